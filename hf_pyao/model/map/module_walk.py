"""Walks over a model's modules by name, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from torch import nn

from hf_pyao.model.map.wrappers import plain_path, unwrap_model, wrapped_module

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Hit:
    """A module that a search found."""

    path: str
    """Its qualified name, without the components that wrappers add."""
    module: nn.Module
    """Itself; where it is compiled, checkpointed or sharded alone, the outermost wrapper."""
    parents: tuple[nn.Module, ...]
    """What holds it, from the root down."""


Accept: TypeAlias = Callable[[Hit], bool]


def walk(root: nn.Module) -> Iterator[Hit]:
    """Yield every module of *root* under every name it has, in order of registration.

    A module that is wrapped follows its wrapper, under the same name.
    """

    yield from _below(Hit("", root, ()))


def _below(hit: Hit) -> Iterator[Hit]:
    yield hit
    parents = (*hit.parents, hit.module)
    for name, child in hit.module._modules.items():
        if child is not None and all(child is not parent for parent in parents):
            yield from _below(Hit(_join(hit.path, name), child, parents))


def outermost(root: nn.Module, accept: Accept) -> Iterator[Hit]:
    """Yield the accepted modules, each once, without looking inside an accepted one."""
    yield from _outermost_below(Hit("", root, ()), accept, set())


def _outermost_below(hit: Hit, accept: Accept, seen: set[int]) -> Iterator[Hit]:
    """Yield the accepted modules of *hit*; *seen* has the ids of those looked at before."""
    if id(hit.module) in seen:
        return
    seen.add(id(hit.module))
    if accept(hit):
        yield hit
        return
    for name, child in hit.module.named_children():
        below = Hit(_join(hit.path, name), child, (*hit.parents, hit.module))
        yield from _outermost_below(below, accept, seen)


def is_called(module: nn.Module) -> bool:
    """Say whether *module* has a forward: hooks on a list or dict of modules never fire."""
    return type(unwrap_model(module)).forward is not nn.Module.forward


def stack_of(hits: Sequence[Hit], root: nn.Module) -> nn.Module:
    """Return the smallest module with a forward of its own that holds all *hits*."""
    levels = zip(*(hit.parents for hit in hits), strict=False)
    common: list[nn.Module] = [level[0] for level in takewhile(_is_one_module, levels)]
    while common:
        module = common.pop()
        # A Sequential has a forward, but models often loop over its elements and never call it.
        if is_called(module) and not isinstance(module, CONTAINERS):
            # A wrapper around the stack alone is what the model calls.
            while common and wrapped_module(common[-1]) is module:
                module = common.pop()
            return module
    return root


def _is_one_module(modules: tuple[nn.Module, ...]) -> bool:
    return all(module is modules[0] for module in modules)


def _join(path: str, name: str) -> str:
    return plain_path(f"{path}.{name}" if path else name)
