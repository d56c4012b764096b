"""What is put on a model: engine, hooks, head loss. For ``attach``, and for recordings of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from hf_pyao.engine.codecs import Codec, get_codec
from hf_pyao.engine.recompute.recomputer import LayerRecomputer
from hf_pyao.engine.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.engine.recompute.verification import Sampler
from hf_pyao.engine.runtime.backward_order import BackwardOrder
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.engine.runtime.policy import (
    POINTWISE,
    KeepLastLayers,
    Policy,
    RecomputeSelected,
    Selection,
)
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.levers import Levers
from hf_pyao.model.map.buffer_keys import BufferKeys
from hf_pyao.model.map.module_map import FoundLayers, named_submodules, resolve_selections
from hf_pyao.model.map.sharding import KnownSharding

if TYPE_CHECKING:
    from hf_pyao.model.attention.attention_groups import AttentionGroups
    from hf_pyao.model.head.head_loss import HeadLoss
    from hf_pyao.model.tiles.mlp_tiles import MLPTiles


def make_engine(
    model: nn.Module,
    policy: Policy,
    link: LinkContext,
    *,
    codec: str | Codec,
    enters_always: bool,
    backward_order: BackwardOrder | None = None,
    sampler: Sampler | None = None,
) -> OffloadEngine:
    """Return an engine that follows *policy* over *link*.

    Args:
        model: whose buffers never move; it is held weakly.
        policy: what decides.
        link: how bytes travel.
        codec: how tensors are written on the host, where the policy does not say.
        enters_always: layers are entered also while the policy keeps everything.
        backward_order: as in :func:`~hf_pyao.attach`.
        sampler: checks what the engine rebuilds.
    """
    return OffloadEngine(
        policy=policy,
        codec=get_codec(codec),
        link=link,
        recomputer=LayerRecomputer(sampler),
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
    sampler: Sampler | None = None,
) -> Lifecycle:
    """Return what drives *engine* by hooks on *found*, once it is installed.

    Args:
        engine: what is driven.
        found: the layers.
        levers: the segments that are asked for.
        segments_may_come: plans of policy ``auto`` may put layers into segments later.
        sampler: checks what segments give to backward.
    """
    make: Callable[..., Lifecycle] = Lifecycle
    if levers.checkpoint_every or segments_may_come:
        make = functools.partial(
            SegmentLifecycle,
            length=levers.checkpoint_every,
            is_nested=levers.checkpoint_nested,
            saves_attention=levers.save_attention,
            is_asked_for=bool(levers.checkpoint_every),
            sampler=sampler,
        )
    return make(
        engine,
        found.stack,
        found.layers,
        named_submodules=named_submodules,
        sharding=KnownSharding(),
    )


def put_on_head_loss(model: nn.Module, mode: str) -> HeadLoss | None:
    """Put the loss ``PyAOConfig.head_loss`` on *model*'s head; None for ``"off"``.

    Raises:
        ConfigError: the model has no head that it understands.
    """
    if mode == "off":
        return None
    from hf_pyao.model.head.head_loss import install_head_loss  # imports transformers

    return install_head_loss(model, mode)


def put_on_mlp_tiles(
    model: nn.Module, found: FoundLayers, tiles: int | str, sampler: Sampler | None = None
) -> MLPTiles | None:
    """Let the MLPs of *found* run in ``PyAOConfig.mlp_tiles`` tiles; None for ``"off"``.

    *sampler* checks the tiles that run again in backward.
    """
    if tiles == "off":
        return None
    from hf_pyao.model.tiles.mlp_tiles import install_mlp_tiles

    return install_mlp_tiles(model, found, tiles, sampler)


def put_on_attention_groups(
    model: nn.Module, found: FoundLayers, num_groups: int | str, *, may_come: bool = False
) -> AttentionGroups | None:
    """Let attention of *found* run in ``PyAOConfig.attention_groups`` groups.

    None for ``"off"``, unless they *may_come* later, with a plan of policy ``auto``.
    """
    if num_groups == "off" and not may_come:
        return None
    from hf_pyao.model.attention.attention_groups import groups_of

    groups = groups_of(model, found)
    groups.set_groups(num_groups)
    return groups


def select_recomputed(
    names: Sequence[str], found: FoundLayers, label: str = "recompute_modules"
) -> Selection:
    """Return the sub-modules that ``PyAOConfig.recompute_modules`` stands for.

    ``"pointwise"`` stands for no sub-module. Messages call the field *label*.

    Raises:
        ConfigError: a module to recompute is in no layer.
    """
    modules = [name for name in names if name != POINTWISE]
    return resolve_selections(modules, found, field=label, also=(POINTWISE,))


def paths_in_a_layer(names: Sequence[str], selected: Selection) -> tuple[str, ...]:
    """Return what ``recompute_modules`` stands for in a layer: paths, and ``"pointwise"``."""
    paths = {path for each in selected.values() for path in each}
    return (*sorted(paths), *((POINTWISE,) if POINTWISE in names else ()))


def wrap_policy(
    policy: Policy, *, recompute: Sequence[str], selected: Selection, first_kept: int | None
) -> Policy:
    """Put *policy* within what is recomputed and what is kept whatever it decides.

    Args:
        policy: decides on the rest.
        recompute: ``PyAOConfig.recompute_modules``.
        selected: the sub-modules that these are.
        first_kept: index of the first of the last layers that are kept; None: none is.
    """
    if recompute:
        policy = RecomputeSelected(policy, selected, is_pointwise=POINTWISE in recompute)
    if first_kept is not None:
        policy = KeepLastLayers(policy, first_kept)
    return policy


def first_kept_layer(num_layers: int, keep_last_layers: int, levers: Levers) -> int | None:
    """Return the index of the first of the last layers that are kept; None: none is."""
    if not keep_last_layers:
        return None
    return num_layers - levers.kept_layers(num_layers, keep_last_layers)
