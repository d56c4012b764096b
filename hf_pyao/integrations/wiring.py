"""What is put on a model: engine, hooks, head loss. For ``attach``, and for recordings of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_pyao.codecs import get_codec
from hf_pyao.config import PyAOConfig
from hf_pyao.integrations.buffer_keys import BufferKeys
from hf_pyao.integrations.module_map import FoundLayers, named_submodules, resolve_selections
from hf_pyao.integrations.sharding import KnownSharding
from hf_pyao.levers import Levers
from hf_pyao.planning.plan_levers import free_levers
from hf_pyao.recompute.recomputer import LayerRecomputer
from hf_pyao.recompute.segment_lifecycle import SegmentLifecycle
from hf_pyao.recompute.verification import Sampler
from hf_pyao.runtime.backward_order import BackwardOrder
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.lifecycle import Lifecycle
from hf_pyao.runtime.policy import POINTWISE, KeepLastLayers, Policy, RecomputeSelected
from hf_pyao.transfer.link import LinkContext

if TYPE_CHECKING:
    from hf_pyao.integrations.attention_groups import AttentionGroups
    from hf_pyao.integrations.head_loss import HeadLoss
    from hf_pyao.integrations.mlp_tiles import MLPTiles


def make_engine(
    model: nn.Module,
    config: PyAOConfig,
    policy: Policy,
    link: LinkContext,
    backward_order: BackwardOrder | None = None,
    sampler: Sampler | None = None,
) -> OffloadEngine:
    """Return an engine that follows *policy* over *link*; *sampler* checks what it rebuilds."""
    return OffloadEngine(
        policy=policy,
        codec=get_codec(config.codec),
        link=link,
        recomputer=LayerRecomputer(sampler),
        backward_order=backward_order,
        buffer_keys=BufferKeys(model),
        enters_always=bool(config.effective().checkpoint_every),
    )


def make_lifecycle(
    engine: OffloadEngine,
    found: FoundLayers,
    config: PyAOConfig,
    owner: Any = None,
    sampler: Sampler | None = None,
) -> Lifecycle:
    """Return what drives *engine* by hooks on *found*, once it is installed.

    It can put layers into segments where *config* asks for that, or leaves it to policy ``auto``;
    *sampler* checks what these give to backward.
    """
    make: Callable[..., Lifecycle] = Lifecycle
    is_free = config.policy == "auto" and "checkpoint_every" in free_levers(config)
    levers = Levers.of(config)
    if levers.checkpoint_every or is_free:
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
        owner=owner,
    )


def put_on_head_loss(model: nn.Module, config: PyAOConfig) -> HeadLoss | None:
    """Put the loss on *model*'s head that *config* asks for; None if it asks for none.

    Raises:
        ConfigError: the model has no head that it understands.
    """
    mode = config.effective().head_loss
    if mode == "off":
        return None
    from hf_pyao.integrations.head_loss import install_head_loss  # imports transformers

    return install_head_loss(model, mode)


def put_on_mlp_tiles(
    model: nn.Module, found: FoundLayers, config: PyAOConfig, sampler: Sampler | None = None
) -> MLPTiles | None:
    """Let the MLPs of *found* run in tiles as *config* asks; None if it asks for none.

    *sampler* checks the tiles that run again in backward.
    """
    tiles = config.effective().mlp_tiles
    if tiles == "off":
        return None
    from hf_pyao.integrations.mlp_tiles import install_mlp_tiles

    return install_mlp_tiles(model, found, tiles, sampler)


def put_on_attention_groups(
    model: nn.Module, found: FoundLayers, config: PyAOConfig
) -> AttentionGroups | None:
    """Let attention of *found* run in groups as *config* asks, or as a plan may ask later.

    None where neither does.
    """
    num_groups = config.effective().attention_groups
    if num_groups == "off" and "attention_groups" not in free_levers(config):
        return None
    from hf_pyao.integrations.attention_groups import groups_of

    groups = groups_of(model, found)
    groups.set_groups(num_groups)
    return groups


def recomputed_paths(config: PyAOConfig, found: FoundLayers) -> tuple[str, ...]:
    """Return the sub-modules of a layer that ``recompute_modules`` stands for, by path.

    Raises:
        ConfigError: a module to recompute is in no layer.
    """
    names = [name for name in config.recompute_modules if name != POINTWISE]
    selected = resolve_selections(
        names, found, field=config.label("recompute_modules"), also=(POINTWISE,)
    )
    paths = {path for each in selected.values() for path in each}
    return (*sorted(paths), *((POINTWISE,) if POINTWISE in config.recompute_modules else ()))


def wrapper_of(config: PyAOConfig, found: FoundLayers) -> Callable[[Policy], Policy]:
    """Return what puts a policy within what *config* says of recomputing and of last layers.

    It does not hold the model.

    Raises:
        ConfigError: a module to recompute is in no layer.
    """
    names = [name for name in config.recompute_modules if name != POINTWISE]
    selected = resolve_selections(
        names, found, field=config.label("recompute_modules"), also=(POINTWISE,)
    )
    num_layers = len(found.layers)
    keep_last_layers = config.effective().keep_last_layers
    first_kept = num_layers - Levers.of(config).kept_layers(num_layers, keep_last_layers)

    def wrap(policy: Policy) -> Policy:
        if config.recompute_modules:
            is_pointwise = POINTWISE in config.recompute_modules
            policy = RecomputeSelected(policy, selected, is_pointwise=is_pointwise)
        if keep_last_layers:
            policy = KeepLastLayers(policy, first_kept)
        return policy

    return wrap
