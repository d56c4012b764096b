"""Which modules of a layer are an MLP, by the roles of the layer's parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from hf_pyao.model.map.found_layers import FoundLayers, Roles
from hf_pyao.model.map.module_walk import CONTAINERS
from hf_pyao.model.map.role_names import kind_of
from hf_pyao.model.map.wrappers import named_submodules
from hf_pyao.training_engines import compiled_inner, is_compiled, is_compiled_in_place


class FoundMLP(NamedTuple):
    """What looks like an MLP, or a norm."""

    path: str
    """Its name in the model; of the layer's, where the MLP is spread over the layer."""
    places: tuple[nn.Module, ...] = ()
    """The module that is the MLP; or, where it is spread over the layer, the one that goes up,
    activations, and the one that goes down."""
    reason: str = ""
    """Why it is left alone; empty: it may run in tiles, if it treats each token by itself."""
    is_norm: bool = False

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights; where they are sharded, when whole."""
        weights = [weight for place in self.places for weight in place.parameters()]
        return sum(weight.numel() * weight.element_size() for weight in weights)


def find_mlps(found: FoundLayers) -> list[FoundMLP]:
    """Return the MLPs of all layers; a module that several layers share is there once."""
    every = [each for fqn, layer in found.layers for each in _of_layer(fqn, layer, found)]
    first = {each.places[:1]: each for each in reversed(every)}
    return [each for each in every if each.reason or first[each.places[:1]] is each]


def find_norms(found: FoundLayers) -> list[FoundMLP]:
    """Return the norms of the residual in all layers, and those of their kinds outside of layers.

    Norms that are written out in steps make several wide copies of all tokens, which outgrow the
    rest once MLPs run in tiles.
    """
    norms: dict[nn.Module, str] = {}
    for fqn, layer in found.layers:
        roles = found.roles_of(fqn)
        paths = {path for role in ("attn_norm", "mlp_norm") for path in roles.get(role, ())}
        for path, module in () if is_compiled(layer) else named_submodules(layer):
            if path in paths and kind_of(module) == "norm":
                norms.setdefault(module, f"{fqn}.{path}")
    kinds = set(map(type, norms))
    inside_layers = {module for _, layer in found.layers for module in layer.modules()}
    for path, module in found.stack.named_modules():
        if type(module) in kinds and module not in inside_layers:
            norms.setdefault(module, path)
    return [FoundMLP(path, (norm,), is_norm=True) for norm, path in norms.items()]


def _of_layer(fqn: str, layer: nn.Module, found: FoundLayers) -> Iterator[FoundMLP]:
    if is_compiled(layer):
        yield FoundMLP(fqn, reason="its layer is compiled as a whole; compile its MLP alone")
        return
    roles = found.roles_of(fqn)
    outer: dict[str, nn.Module] = {}
    inner: dict[str, nn.Module] = {}
    for path, module in named_submodules(layer):
        outer.setdefault(path, module)
        inner[path] = module  # a wrapper comes before what it wraps
    reason = "its experts are one fused module, and share their tokens"
    every: list[FoundMLP] = [
        FoundMLP(f"{fqn}.{path}", reason=reason) for path in roles.get("experts", ())
    ]
    for of_up, of_down in (("mlp_up", "mlp_down"), ("expert_fc1", "expert_fc2")):
        ups = [path for path in roles.get(of_up, ()) if path in inner]
        downs = [p for p in roles.get(of_down, ()) if p in inner and kind_of(inner[p]) == "linear"]
        every += _group(fqn, ups, downs, roles, outer, inner)
    yield from every or [FoundMLP(fqn, reason="no linear layers of an MLP are known in it")]


def _group(
    fqn: str,
    ups: Sequence[str],
    downs: Sequence[str],
    roles: Roles,
    outer: dict[str, nn.Module],
    inner: dict[str, nn.Module],
) -> Iterator[FoundMLP]:
    """Put linear layers that go up and down together into MLPs."""
    attention = [*roles.get("core_attn", ()), *roles.get("qkv_linear", ())]
    for parent in dict.fromkeys(map(_parent, downs)):
        of_parent = [path for path in ups if _parent(path) == parent]
        name = f"{fqn}.{parent}".rstrip(".")
        if parent and of_parent and not any(p.startswith(f"{parent}.") for p in attention):
            module = outer[parent]
            if is_compiled_in_place(module):
                yield FoundMLP(
                    name, reason="it is compiled in place; put torch.compile(mlp) in its place"
                )
            elif isinstance(inner[parent], CONTAINERS):
                yield FoundMLP(name, reason="it is a list of modules, whose calls are not its own")
            else:
                yield FoundMLP(name, (module,))
        elif not parent and len(ups) == len(downs) == len(of_parent) == 1:
            acts = [path for path in roles.get("mlp_act", ()) if path and not _parent(path)]
            places = tuple(outer[path] for path in (ups[0], *acts, downs[0]))
            if any(map(is_compiled, places)):
                yield FoundMLP(fqn, reason="parts of its MLP are compiled")
            else:
                yield FoundMLP(fqn, places)
        else:
            yield FoundMLP(
                name, reason="the linear layers of its MLP are not together in one module"
            )


def inside(module: nn.Module) -> nn.Module:
    """Return what a compiled *module* was made of; any other itself."""
    return compiled_inner(module) or module


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
