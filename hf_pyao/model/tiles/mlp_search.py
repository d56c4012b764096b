"""Which modules of a layer are an MLP, by the roles of the layer's parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_pyao.model.map.found_layers import FoundLayers, Roles
from hf_pyao.model.map.module_walk import CONTAINERS
from hf_pyao.model.map.role_names import kind_of
from hf_pyao.model.map.wrappers import named_submodules
from hf_pyao.training_engines import compiled_inner, is_compiled, is_compiled_in_place

CHUNK_METHOD = "feed_forward_chunk"
"""BERT's layers and their like keep their MLP in a method of this name, or the next."""
_CHUNK_METHODS = (CHUNK_METHOD, "ff_chunk")


@dataclass(frozen=True, kw_only=True)
class FoundMLP:
    """An MLP that may run in tiles, if it treats each token by itself."""

    path: str
    """Its name in the model; of the layer's, where the MLP is spread over the layer."""
    places: tuple[nn.Module, ...]
    """The module whose method is the MLP; or, where it is spread over the layer, the one that goes
    up, activations, and the one that goes down."""
    parts: tuple[nn.Module, ...]
    """All modules that the MLP calls, and with them those inside."""
    up: nn.Module
    """A linear layer that goes up; a norm itself."""
    method: str = "forward"
    """The method that is the MLP."""
    part_names: tuple[str, ...] = ()
    """Names, in the module, of the parts of a method that is not ``forward``."""
    is_compiled: bool = False
    """Whether the module is compiled code."""
    is_norm: bool = False
    """Whether it is no MLP but a norm, which treats each token by itself too."""

    @property
    def is_spread(self) -> bool:
        """Whether the MLP has no module or method of its own."""
        return len(self.places) > 1

    @property
    def num_inputs(self) -> int:
        """Return how many tensors the method takes."""
        if self.is_spread:
            return 1
        own: Callable[..., Any] = getattr(type(inside(self.places[0])), self.method)
        parameters = list(inspect.signature(own).parameters.values())[1:]
        return max(
            1, sum(each.default is each.empty and each.kind in _POSITIONAL for each in parameters)
        )


@dataclass(frozen=True)
class NotFound:
    """Why something that looks like an MLP is left alone."""

    path: str
    reason: str


def find_mlps(found: FoundLayers) -> list[FoundMLP | NotFound]:
    """Return the MLPs of all layers; a module that several layers share is there once."""
    results: list[FoundMLP | NotFound] = []
    seen: set[tuple[int, str]] = set()
    for fqn, layer in found.layers:
        for each in _of_layer(fqn, layer, found.roles_of(fqn)):
            if isinstance(each, FoundMLP):
                key = (id(each.places[0]), each.method)
                if key in seen:
                    continue
                seen.add(key)
            results.append(each)
    return results


def find_norms(found: FoundLayers) -> list[FoundMLP]:
    """Return the norms of the residual in all layers, and those of their kinds outside of layers.

    Norms that are written out in steps make several wide copies of all tokens, which outgrow the
    rest once MLPs run in tiles.
    """
    norms: dict[nn.Module, str] = {}
    kinds: set[type] = set()
    for fqn, layer in found.layers:
        if is_compiled(layer):
            continue
        roles = found.roles_of(fqn)
        paths = {path for role in ("attn_norm", "mlp_norm") for path in roles.get(role, ())}
        for path, module in named_submodules(layer):
            if path in paths and kind_of(module) == "norm":
                norms.setdefault(module, f"{fqn}.{path}")
                kinds.add(type(module))
    inside_layers = {module for _, layer in found.layers for module in layer.modules()}
    for path, module in found.stack.named_modules():
        if type(module) in kinds and module not in inside_layers:
            norms.setdefault(module, path)
    return [
        FoundMLP(path=path, places=(norm,), parts=(norm,), up=norm, is_norm=True)
        for norm, path in norms.items()
    ]


def _of_layer(fqn: str, layer: nn.Module, roles: Roles) -> Iterator[FoundMLP | NotFound]:
    if is_compiled(layer):
        yield NotFound(fqn, "its layer is compiled as a whole; compile its MLP alone")
        return
    outer: dict[str, nn.Module] = {}
    inner: dict[str, nn.Module] = {}
    for path, module in named_submodules(layer):
        outer.setdefault(path, module)
        inner[path] = module  # a wrapper comes before what it wraps
    is_any = False
    for path in roles.get("experts", ()):
        is_any = True
        yield NotFound(f"{fqn}.{path}", "its experts are one fused module, and share their tokens")
    for of_up, of_down in (("mlp_up", "mlp_down"), ("expert_fc1", "expert_fc2")):
        ups = [path for path in roles.get(of_up, ()) if path in inner]
        downs = [p for p in roles.get(of_down, ()) if p in inner and kind_of(inner[p]) == "linear"]
        for each in _group(fqn, ups, downs, roles, outer, inner):
            is_any = True
            yield each
    if not is_any:
        yield NotFound(fqn, "no linear layers of an MLP are known in it")


def _group(
    fqn: str,
    ups: Sequence[str],
    downs: Sequence[str],
    roles: Roles,
    outer: dict[str, nn.Module],
    inner: dict[str, nn.Module],
) -> Iterator[FoundMLP | NotFound]:
    """Put linear layers that go up and down together into MLPs."""
    parents = dict.fromkeys(_parent(path) for path in downs)
    attention = [*roles.get("core_attn", ()), *roles.get("qkv_linear", ())]
    for parent in parents:
        of_parent = [path for path in ups if _parent(path) == parent]
        name = f"{fqn}.{parent}" if parent else fqn
        if parent and of_parent and not any(p.startswith(f"{parent}.") for p in attention):
            module = outer[parent]
            if is_compiled_in_place(module):
                yield NotFound(name, "it is compiled in place; put torch.compile(mlp) in its place")
            elif isinstance(inner[parent], CONTAINERS):
                yield NotFound(name, "it is a list of modules, whose calls are not its own")
            else:
                yield FoundMLP(
                    path=name,
                    places=(module,),
                    parts=(module,),
                    up=inner[of_parent[0]],
                    is_compiled=is_compiled(module),
                )
            continue
        tops = dict.fromkeys(path.partition(".")[0] for path in (*ups, *downs) if path)
        layer = inner[""]
        method = next((m for m in _CHUNK_METHODS if callable(getattr(layer, m, None))), None)
        if method is not None and ups and not any(t in attention for t in tops):
            yield FoundMLP(
                path=fqn,
                places=(layer,),
                parts=tuple(outer[top] for top in tops),
                up=inner[ups[0]],
                method=method,
                part_names=tuple(tops),
            )
        elif not parent and len(ups) == len(downs) == 1 and not _parent(ups[0]):
            acts = [path for path in roles.get("mlp_act", ()) if path and not _parent(path)]
            places = (outer[ups[0]], *(outer[path] for path in acts), outer[downs[0]])
            if any(is_compiled(place) for place in places):
                yield NotFound(fqn, "parts of its MLP are compiled")
            else:
                yield FoundMLP(path=fqn, places=places, parts=places, up=inner[ups[0]])
        else:
            yield NotFound(name, "the linear layers of its MLP are not together in one module")
        return


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def inside(module: nn.Module) -> nn.Module:
    """Return what a compiled *module* was made of; any other itself."""
    return compiled_inner(module) or module


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
