"""Makes the engine and the hooks that drive it, for ``attach`` and for recordings of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from hf_pyao.engine.codecs import Codec, get_codec
from hf_pyao.engine.recompute.recomputer import LayerRecomputer
from hf_pyao.engine.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.engine.recompute.verification import SecondRuns
from hf_pyao.engine.runtime.backward_order import BackwardOrder
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.lifecycle import Lifecycle, do_nothing
from hf_pyao.engine.runtime.policy import Policy
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.levers import Levers
from hf_pyao.model.map.buffer_keys import BufferKeys
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.sharding import KnownSharding
from hf_pyao.model.map.wrappers import named_submodules


def make_engine(
    model: nn.Module,
    policy: Policy,
    link: LinkContext,
    *,
    codec: str | Codec,
    enters_always: bool,
    backward_order: BackwardOrder | None = None,
    second_runs: SecondRuns | None = None,
) -> OffloadEngine:
    """Return an engine that follows *policy* over *link*.

    Args:
        model: whose buffers never move; it is held weakly.
        policy: what decides.
        link: how bytes travel.
        codec: how tensors are written on the host, where the policy does not say.
        enters_always: layers are entered also while the policy keeps everything.
        backward_order: as in :func:`~hf_pyao.attach`.
        second_runs: checks what the engine rebuilds.
    """
    return OffloadEngine(
        policy=policy,
        codec=get_codec(codec),
        link=link,
        recomputer=LayerRecomputer(second_runs),
        backward_order=backward_order,
        buffer_keys=BufferKeys(model),
        enters_always=enters_always,
    )


def make_lifecycle(
    engine: OffloadEngine,
    found: FoundLayers,
    levers: Levers,
    *,
    segments_may_come: bool = False,
    second_runs: SecondRuns | None = None,
    before_forward: Callable[[], None] = do_nothing,
) -> Lifecycle:
    """Return what drives *engine* by hooks on *found*, once it is installed.

    Args:
        engine: what is driven.
        found: the layers.
        levers: the segments that are asked for.
        segments_may_come: plans of policy ``auto`` may put layers into segments later.
        second_runs: checks what segments give to backward.
        before_forward: called as a forward begins, before anything is decided for it.
    """
    make: Callable[..., Lifecycle] = Lifecycle
    if levers.checkpoint_every or segments_may_come:
        make = functools.partial(
            SegmentLifecycle,
            length=levers.checkpoint_every,
            is_nested=levers.checkpoint_nested,
            saves_attention=levers.save_attention,
            is_asked_for=bool(levers.checkpoint_every),
            second_runs=second_runs,
        )
    return make(
        engine,
        found.stack,
        found.layers,
        named_submodules=named_submodules,
        sharding=KnownSharding(),
        before_forward=before_forward,
    )
