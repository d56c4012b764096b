"""The roles of a layer's parts, where no module map gives them: from names, kinds and structure.

Everything here works on ``parts``, path -> kind, and knows no architecture; the names are those of
:mod:`~hf_pyao.model.map.role_names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_pyao.model.map import role_names as names
from hf_pyao.model.map.architectures import ROLES
from hf_pyao.model.map.role_names import Kind, is_named, kind_of
from hf_pyao.model.map.wrappers import named_submodules

Parts = Mapping[str, Kind]
"""Path inside a layer -> kind of the module there, in order of definition; without the layer
itself, and without what is below a Linear layer (adapters)."""

Owners = dict[str, str]
"""Path -> role."""

# [Note: How roles are inferred]
# 1. A module that holds linear layers named like queries, keys and values is core_attn. The widest
#    module around it that holds no part of an MLP is the attention's zone (BERT's ``attention``,
#    T5's ``layer.0``): names such as ``dense`` and ``wo`` mean attn_proj inside, mlp_down outside.
# 2. ``experts`` is a zone of its own. A list of experts has the three expert roles; a fused module
#    has ``experts`` and, where it calls one, moe_act.
# 3. What is left is of the MLP, if its name says so; a shared expert is an MLP too. mlp_act is the
#    activation beside a linear layer that goes up, and what the module around the two saves itself.
# 4. A norm goes with the zone that it is in. Beside both, its name decides. One that serves
#    attention and MLP alike (Cohere, Phi, Falcon, GPT-J) is attn_norm, and there is no mlp_norm.
# What fits nothing has no role, and can be named by its path.


@dataclass(frozen=True, kw_only=True)
class _Zones:
    """Which parts of a layer are attention, experts and MLP."""

    cores: tuple[str, ...]
    """Modules that run attention itself."""
    attention: tuple[str, ...]
    """The zones around them."""
    experts: tuple[str, ...]
    ups: tuple[str, ...]
    """Linear layers that go up, outside of attention and experts."""
    above_attention: frozenset[str]
    """Every module that has attention below it; ``""`` is the layer."""
    above_mlp: frozenset[str]
    """Every module that has a part of an MLP, or experts, below it."""


def infer_by_layer(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, dict[str, Sequence[str]]]:
    """Return fqn -> roles, for layers given as ``(fqn, module)``; equal layers share the work."""
    known: dict[tuple[tuple[str, Kind], ...], dict[str, Sequence[str]]] = {}
    inferred: dict[str, dict[str, Sequence[str]]] = {}
    for fqn, layer in layers:
        parts = parts_of(layer)
        key = tuple(parts.items())
        if key not in known:
            known[key] = infer_roles(parts)
        inferred[fqn] = known[key]
    return inferred


def parts_of(layer: nn.Module) -> dict[str, Kind]:
    """Return path -> kind for what is below *layer*, looking through wrappers."""
    # A wrapper comes before what it wraps, under the same path: the last one is the real module.
    kinds = {path: kind_of(module) for path, module in named_submodules(layer) if path}
    return {
        path: kind
        for path, kind in kinds.items()
        if all(kinds.get(above) != "linear" for above in _above(path))
    }


def infer_roles(parts: Parts) -> dict[str, Sequence[str]]:
    """Return role -> paths for one layer, in the order of ``ROLES``; no path has two roles."""
    zones = _zones_of(parts)
    owners: Owners = {}
    for assign in (_own_attention, _own_experts, _own_mlp, _own_norms, _own_dropouts):
        for path, role in assign(parts, zones):
            owners.setdefault(path, role)
    ordered = {role: tuple(p for p in owners if owners[p] == role) for role in ROLES}
    return {role: paths for role, paths in ordered.items() if paths}


def _zones_of(parts: Parts) -> _Zones:
    experts = tuple(path for path in parts if is_named(path, names.EXPERTS))
    qkv = [p for p in _linears(parts, names.QKV) if not _is_in(p, experts)]
    # Rows of q, k and v that lie in the layer itself leave no module for core_attn.
    cores = tuple(dict.fromkeys(_parent(path) for path in qkv))
    ups = tuple(
        path
        for path in _linears(parts, names.MLP_UP)
        if not _is_in(path, experts) and (not _parent(path) or _parent(path) not in cores)
    )
    above_mlp = frozenset(above for path in (*ups, *experts) for above in _above(path))
    # Attention whose projections have other names, or are none: by its class.
    above_qkv = {above for path in qkv for above in _above(path)}
    others = [
        path
        for path, kind in parts.items()
        if kind == "attention" and path not in above_qkv and path not in above_mlp
    ]
    others = [path for path in others if not _is_in(_parent(path), [*cores, *others])]
    cores = tuple(core for core in (*cores, *others) if core)
    return _Zones(
        cores=cores,
        attention=tuple(dict.fromkeys(_widest_outside(core, above_mlp) for core in cores)),
        experts=experts,
        ups=ups,
        above_attention=frozenset(above for path in (*qkv, *others) for above in _above(path)),
        above_mlp=above_mlp,
    )


def _own_attention(parts: Parts, zones: _Zones) -> Iterator[tuple[str, str]]:
    for path in _linears(parts, names.QKV):
        if not _is_in(path, zones.experts):
            yield path, "qkv_linear"
    for path in zones.cores:
        yield path, "core_attn"
    for path in _linears(parts, names.ATTN_PROJ):
        if _is_in(path, zones.attention):
            yield path, "attn_proj"


def _own_experts(parts: Parts, zones: _Zones) -> Iterator[tuple[str, str]]:
    for experts in zones.experts:
        inside = {path: kind for path, kind in parts.items() if _is_in(path, [experts])}
        ups = list(_linears(inside, names.MLP_UP))
        for path in ups:
            yield path, "expert_fc1"
        for path in _linears(inside, names.MLP_DOWN):
            yield path, "expert_fc2"
        if not ups and parts[experts] != "container":
            yield experts, "experts"
        expert_modules = {_parent(path) for path in ups}
        for path, kind in inside.items():
            if path in expert_modules or kind == "activation":
                yield path, "moe_act"
        block = _parent(experts)
        for path in parts:
            if _parent(path) == block and is_named(path, names.ROUTER):
                yield path, "router"
        # What the block saves itself is the weighing of what the experts return.
        if block and block not in zones.above_attention:
            yield block, "router"


def _own_mlp(parts: Parts, zones: _Zones) -> Iterator[tuple[str, str]]:
    for path in zones.ups:
        yield path, "mlp_up"
    if zones.ups:
        for path in _downs(parts, zones):
            yield path, "mlp_down"
    modules = {_parent(path) for path in zones.ups}
    for path in _mlps(zones):
        yield path, "mlp_act"
    for path, kind in parts.items():
        if kind == "activation" and _parent(path) in modules:
            yield path, "mlp_act"


def _own_norms(parts: Parts, zones: _Zones) -> Iterator[tuple[str, str]]:
    beside_both: dict[str, list[str]] = {}
    mlps = _mlps(zones)
    for path, kind in parts.items():
        parent = _parent(path)
        if kind != "norm" or _is_in(path, zones.experts):
            continue
        if _is_in(path, zones.cores):
            if is_named(path, names.WHOLE_BLOCK_NORM):
                yield path, "attn_norm"
        elif _is_in(path, zones.attention):
            yield path, "attn_norm"
        elif parent and parent not in zones.above_attention:
            if parent not in mlps and _holds_mlp(parent, parts, zones):
                yield path, "mlp_norm"
        else:
            beside_both.setdefault(parent, []).append(path)
    for parent, norms in beside_both.items():
        for path, role in roles_of_norms(norms).items():
            above = zones.above_attention if role == "attn_norm" else zones.above_mlp
            if parent in above:
                yield path, role


def roles_of_norms(paths: Sequence[str]) -> dict[str, str]:
    """Return path -> ``"attn_norm"`` or ``"mlp_norm"`` for the norms of one block, by their names.

    ``post_attention_layernorm`` is of attention where nothing else is before attention (OLMo 2), or
    something else is before the MLP (Gemma 2); otherwise it is what is before the MLP (Llama).
    """
    roles: dict[str, str] = {}
    late = [path for path in paths if is_named(path, names.POST_ATTENTION_NORM)]
    for path in paths:
        if path not in late and is_named(path, names.MLP_NORM):
            roles[path] = "mlp_norm"
        elif path not in late and is_named(path, names.ATTN_NORM):
            roles[path] = "attn_norm"
    has_before_attention = "attn_norm" in roles.values()
    has_before_mlp = any("pre_" in path for path, role in roles.items() if role == "mlp_norm")
    for path in late:
        is_before_mlp = has_before_attention and not has_before_mlp
        roles[path] = "mlp_norm" if is_before_mlp else "attn_norm"
    return roles


def _own_dropouts(parts: Parts, zones: _Zones) -> Iterator[tuple[str, str]]:
    mlps = _mlps(zones)
    dropouts = [path for path, kind in parts.items() if kind == "dropout"]
    behind = [
        path
        for path in dropouts
        if _parent(path) not in (*mlps, *zones.above_attention)
        and _holds_mlp(_parent(path), parts, zones)
        and not _is_in(path, zones.experts)
    ]
    for path in dropouts:
        is_last = is_named(path, names.RESIDUAL_DROPOUT)
        if _is_in(path, zones.attention):
            if is_last or not _is_in(path, zones.cores):
                yield path, "attn_proj"
        elif is_named(path, names.ATTN_DROPOUT) and zones.cores:
            yield path, "attn_proj"
        elif path in behind or (is_named(path, names.MLP_DROPOUT) and zones.ups):
            yield path, "mlp_down"
        elif _parent(path) in mlps and (
            # Where another one is behind the MLP, the one inside is before the last product (T5).
            is_last or (is_named(path, names.PLAIN_DROPOUT) and not behind)
        ):
            yield path, "mlp_down"


def _mlps(zones: _Zones) -> list[str]:
    """Return the modules that are an MLP: what holds a linear layer that goes up, and only that."""
    parents = dict.fromkeys(_parent(path) for path in zones.ups)
    return [path for path in parents if path and path not in zones.above_attention]


def _downs(parts: Parts, zones: _Zones) -> Iterator[str]:
    for path in _linears(parts, names.MLP_DOWN):
        if not _is_in(path, (*zones.attention, *zones.experts)):
            yield path


def _holds_mlp(parent: str, parts: Parts, zones: _Zones) -> bool:
    return parent in zones.above_mlp or any(
        _is_in(path, [parent]) for path in _downs(parts, zones) if zones.ups
    )


def _linears(parts: Parts, patterns: tuple[str, ...]) -> Iterator[str]:
    for path, kind in parts.items():
        if kind == "linear" and is_named(path, patterns):
            yield path


def _widest_outside(path: str, above_mlp: frozenset[str]) -> str:
    """Return the outermost module around *path*, or *path*, that has no part of an MLP below."""
    while _parent(path) and _parent(path) not in above_mlp:
        path = _parent(path)
    return path


def _is_in(path: str, zones: Iterable[str]) -> bool:
    return any(path == zone or path.startswith(f"{zone}.") for zone in zones)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules that *path* is inside of, the layer (``""``) last."""
    while path:
        path = _parent(path)
        yield path
