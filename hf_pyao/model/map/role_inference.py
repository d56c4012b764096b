"""The roles of a layer's parts, where no module map gives them: from names, kinds and structure.

Everything here works on ``parts``, path -> kind, and knows no architecture; the names are those of
:mod:`~hf_pyao.model.map.role_names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hf_pyao.model.map import role_names as names
from hf_pyao.model.map.architectures import ROLES
from hf_pyao.model.map.role_names import Kind, is_named, kind_of
from hf_pyao.model.map.wrappers import named_submodules

Parts = Mapping[str, Kind]
"""Path inside a layer -> kind of the module there, in order of definition; without the layer
itself, and without what is below a Linear layer (adapters)."""

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
    zones = _Zones(parts)
    owners = {path: zones.role_of(path, kind) for path, kind in parts.items()}
    ordered = {role: tuple(path for path in owners if owners[path] == role) for role in ROLES}
    return {role: paths for role, paths in ordered.items() if paths}


class _Zones:
    """Which parts of a layer are attention, experts and MLP.

    Args:
        parts: of the layer.
    """

    def __init__(self, parts: Parts) -> None:
        self.experts = [path for path in parts if is_named(path, names.EXPERTS)]
        outside = {path: kind for path, kind in parts.items() if not _is_in(path, self.experts)}
        self.qkv = _linears(outside, names.QKV)
        # Rows of q, k and v that lie in the layer itself leave no module for core_attn.
        cores = list(dict.fromkeys(map(_parent, self.qkv)))
        self.ups = [
            path
            for path in _linears(outside, names.MLP_UP)
            if not _parent(path) or _parent(path) not in cores
        ]
        self.above_mlp = _above(*self.ups, *self.experts)
        # Attention whose projections have other names, or are none: by its class.
        around = _above(*self.qkv) | self.above_mlp
        others = [p for p, kind in parts.items() if kind == "attention" and p not in around]
        others = [path for path in others if not _is_in(_parent(path), [*cores, *others])]
        self.cores = [core for core in (*cores, *others) if core]
        self.attention = [_widest_outside(core, self.above_mlp) for core in self.cores]
        self.above_attention = _above(*self.qkv, *others)
        downs = _linears(outside, names.MLP_DOWN) if self.ups else []
        self.downs = [path for path in downs if not _is_in(path, self.attention)]
        self.expert_ups = _linears({p: parts[p] for p in parts.keys() - outside}, names.MLP_UP)
        self.blocks = [_parent(path) for path in self.experts]
        around_ups = {_parent(path) for path in self.ups}
        # An MLP: what holds a linear layer that goes up, and only that.
        self.mlps = {path for path in around_ups if path not in ("", *self.above_attention)}
        self.acts = {p for p in parts if parts[p] == "activation" and _parent(p) in around_ups}
        self.norms = [path for path in outside if parts[path] == "norm"]
        self.dropouts_behind = [
            path
            for path in outside
            if parts[path] == "dropout"
            and _parent(path) not in (*self.mlps, *self.above_attention)
            and self._holds_mlp(_parent(path))
        ]

    def role_of(self, path: str, kind: Kind) -> str | None:
        """Return the role of the part at *path*; None if it has none."""
        block = _parent(path)
        is_expert = _is_in(path, self.experts)
        is_attention = _is_in(path, self.attention)
        is_linear = kind == "linear"
        is_act = kind == "activation" or path in map(_parent, self.expert_ups)
        has_ups = any(_is_in(up, [path]) for up in self.expert_ups)
        is_router = is_named(path, names.ROUTER) and block in self.blocks
        cases = (
            (path in self.qkv, "qkv_linear"),
            (path in self.cores, "core_attn"),
            (is_linear and is_attention and is_named(path, names.ATTN_PROJ), "attn_proj"),
            (path in self.expert_ups, "expert_fc1"),
            (is_linear and is_expert and is_named(path, names.MLP_DOWN), "expert_fc2"),
            (path in self.experts and kind != "container" and not has_ups, "experts"),
            (is_expert and is_act, "moe_act"),
            # What the block saves itself is the weighing of what the experts return.
            (is_router or path in {*self.blocks} - self.above_attention, "router"),
            (path in self.ups, "mlp_up"),
            (path in self.downs, "mlp_down"),
            (path in self.mlps or path in self.acts, "mlp_act"),
        )
        for fits, role in cases:
            if fits:
                return role
        if kind == "norm" and not is_expert:
            return self._role_of_norm(path)
        return self._role_of_dropout(path) if kind == "dropout" else None

    def _role_of_norm(self, path: str) -> str | None:
        block = _parent(path)
        if _is_in(path, self.cores):
            return "attn_norm" if is_named(path, names.WHOLE_BLOCK_NORM) else None
        if _is_in(path, self.attention):
            return "attn_norm"
        if block and block not in self.above_attention:
            return "mlp_norm" if block not in self.mlps and self._holds_mlp(block) else None
        role = _role_beside_both(path, [norm for norm in self.norms if _parent(norm) == block])
        above = {"attn_norm": self.above_attention, "mlp_norm": self.above_mlp}
        return role if role is not None and block in above[role] else None

    def _role_of_dropout(self, path: str) -> str | None:
        is_last = is_named(path, names.RESIDUAL_DROPOUT)
        if _is_in(path, self.attention):
            return "attn_proj" if is_last or not _is_in(path, self.cores) else None
        if is_named(path, names.ATTN_DROPOUT) and self.cores:
            return "attn_proj"
        if path in self.dropouts_behind or (is_named(path, names.MLP_DROPOUT) and self.ups):
            return "mlp_down"
        # Where another one is behind the MLP, the one inside is before the last product (T5).
        is_last |= is_named(path, names.PLAIN_DROPOUT) and not self.dropouts_behind
        return "mlp_down" if _parent(path) in self.mlps and is_last else None

    def _holds_mlp(self, path: str) -> bool:
        return path in self.above_mlp or any(_is_in(down, [path]) for down in self.downs)


def _role_beside_both(path: str, norms: Sequence[str]) -> str | None:
    """Return ``"attn_norm"`` or ``"mlp_norm"`` for one of a block's *norms*, by their names.

    ``post_attention_layernorm`` is of attention where nothing else is before attention (OLMo 2), or
    something else is before the MLP (Gemma 2); otherwise it is what is before the MLP (Llama).
    """
    others = [norm for norm in norms if not is_named(norm, names.POST_ATTENTION_NORM)]
    of_mlp = [norm for norm in others if is_named(norm, names.MLP_NORM)]
    of_attention = [n for n in others if n not in of_mlp and is_named(n, names.ATTN_NORM)]
    if path not in others:
        is_before_mlp = of_attention and not any("pre_" in norm for norm in of_mlp)
        return "mlp_norm" if is_before_mlp else "attn_norm"
    return "mlp_norm" if path in of_mlp else "attn_norm" if path in of_attention else None


def _linears(parts: Parts, patterns: tuple[str, ...]) -> list[str]:
    return [path for path in parts if parts[path] == "linear" and is_named(path, patterns)]


def _widest_outside(path: str, above_mlp: set[str]) -> str:
    """Return the outermost module around *path*, or *path*, that has no part of an MLP below."""
    while _parent(path) and _parent(path) not in above_mlp:
        path = _parent(path)
    return path


def _is_in(path: str, zones: Iterable[str]) -> bool:
    return any(path == zone or path.startswith(f"{zone}.") for zone in zones)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _above(*paths: str) -> set[str]:
    """Return the paths of the modules that one of *paths* is inside of; the layer is ``""``."""
    above: set[str] = set()
    for path in paths:
        while path:
            path = _parent(path)
            above.add(path)
    return above
