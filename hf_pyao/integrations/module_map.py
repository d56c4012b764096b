"""Find the layers of a model, and give names to what is inside one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from torch import nn

from hf_pyao.errors import NoLayersFoundError
from hf_pyao.integrations.architectures import (
    MODULE_MAPS,
    ROLES,
    FoundLayers,
    ModuleMap,
    model_type_of,
    module_map_of,
    register_module_map,
)
from hf_pyao.integrations.module_roles import (
    check_roles,
    resolve_selection,
    resolve_selections,
    role_of_submodules,
)
from hf_pyao.integrations.wrappers import (
    class_name,
    named_submodules,
    plain_path,
    unwrap_model,
    wrapped_module,
)

__all__ = [
    "MODULE_MAPS",
    "ROLES",
    "FoundLayers",
    "ModuleMap",
    "check_roles",
    "find_layers",
    "named_submodules",
    "plain_path",
    "register_module_map",
    "resolve_selection",
    "resolve_selections",
    "role_of_submodules",
    "unwrap_model",
]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_Accept: TypeAlias = Callable[[nn.Module, str, nn.Module | None], bool]
"""``(module, path of its parent, its parent)`` -> whether the module is a layer."""


@dataclass(frozen=True)
class _Hit:
    path: str
    module: nn.Module
    parents: tuple[nn.Module, ...]  # from the root down


def find_layers(model: nn.Module) -> FoundLayers:
    """Find the layers of *model*, wrapped or not.

    The module map of the architecture decides, if there is one. Otherwise the layers are the
    outermost instances of transformers' ``GradientCheckpointingLayer``: the blocks of a vision
    tower or an encoder count, the experts inside a layer do not.

    Raises:
        NoLayersFoundError: nothing was found; the message lists the module lists of the model and
            the ``register_module_map`` call to make.
        ConflictError: the model is wrapped in ``nn.DataParallel``.
    """
    root = unwrap_model(model)
    known = module_map_of(root)
    if known is not None:
        architecture, module_map = known
        how = f"explicit map for {architecture!r}"
        hits = list(_outermost(root, _element_of(tuple(module_map.layers))))
    else:
        module_map, how = None, "GradientCheckpointingLayer rule"
        hits = list(_outermost(root, _is_checkpointing_layer))
    if not hits:
        raise NoLayersFoundError(_no_layers_message(root, how, module_map))
    return FoundLayers(
        layers=tuple((hit.path, hit.module) for hit in hits),
        stack=_stack_of(hits, root),
        roles=module_map.roles if module_map else {},
        optional=module_map.optional if module_map else (),
        how=how,
    )


def _outermost(root: nn.Module, accept: _Accept) -> Iterator[_Hit]:
    """Yield the accepted modules, each once, without looking inside an accepted one."""
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, parents: tuple[nn.Module, ...]) -> Iterator[_Hit]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            child_path = plain_path(f"{path}.{name}" if path else name)
            if not accept(child, path, module):
                yield from visit(child, child_path, (*parents, module))
            elif id(child) not in seen:
                seen.add(id(child))
                yield _Hit(child_path, child, (*parents, module))

    if accept(root, "", None):
        yield _Hit("", root, ())
    else:
        yield from visit(root, "", ())


def _element_of(suffixes: tuple[str, ...]) -> _Accept:
    def accept(module: nn.Module, parent_path: str, parent: nn.Module | None) -> bool:
        dotted = f".{parent_path}"
        return isinstance(parent, _CONTAINERS) and any(dotted.endswith(f".{s}") for s in suffixes)

    return accept


def _is_checkpointing_layer(module: nn.Module, parent_path: str, parent: nn.Module | None) -> bool:
    # Asking for a module that is already imported, instead of importing it, keeps plain torch
    # models free of transformers: without that module no instance of the class can exist.
    modeling_layers = sys.modules.get("transformers.modeling_layers")
    return modeling_layers is not None and isinstance(
        unwrap_model(module), modeling_layers.GradientCheckpointingLayer
    )


def _stack_of(hits: list[_Hit], root: nn.Module) -> nn.Module:
    levels = zip(*(hit.parents for hit in hits), strict=False)
    common: list[nn.Module] = [level[0] for level in takewhile(_same, levels)]
    while common:
        module = common.pop()
        if _has_own_forward(module):
            # A wrapper around the stack alone is what the model calls.
            while common and wrapped_module(common[-1]) is module:
                module = common.pop()
            return module
    return root


def _same(modules: tuple[nn.Module, ...]) -> bool:
    return all(module is modules[0] for module in modules)


def _has_own_forward(module: nn.Module) -> bool:
    # A Sequential has a forward, but models often loop over its elements and never call it.
    return type(module).forward is not nn.Module.forward and not isinstance(module, _CONTAINERS)


def _no_layers_message(root: nn.Module, how: str, module_map: ModuleMap | None) -> str:
    name = class_name(root)
    if module_map is not None:
        cause = f"the paths {list(module_map.layers)} of the {how} lead to no module list in it"
    else:
        cause = (
            "no module of it is a transformers GradientCheckpointingLayer, and there is no module "
            "map for it"
        )
    lists = _candidates(root)
    if not lists:
        return (
            f"found no layers in {name}: {cause}. Nor is there a ModuleList, ModuleDict or "
            "Sequential inside it that could hold them: put the repeated blocks of the model into "
            "a ModuleList, then name its path with register_module_map."
        )
    rows = "\n".join(
        f"  {path}: {len(children)} x {', '.join(_class_names(children))}"
        for path, children in lists.items()
    )
    largest = max(lists, key=lambda path: sum(_num_parameters(child) for child in lists[path]))
    return (
        f"found no layers in {name}: {cause}. Its module lists are:\n{rows}\n"
        "Name the one that holds the layers before attaching, for example:\n"
        "  from hf_pyao import ModuleMap, register_module_map\n"
        f"  register_module_map({model_type_of(root) or name!r}, "
        f"ModuleMap(layers=({largest!r},)))"
    )


def _candidates(root: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the outermost lists of modules by path; dicts and sequentials if they are uniform."""

    def accept(module: nn.Module, parent_path: str, parent: nn.Module | None) -> bool:
        if parent is None or not isinstance(module, _CONTAINERS) or len(module) == 0:
            return False
        is_uniform = len(module) > 1 and len(_class_names(module.children())) == 1
        return isinstance(module, nn.ModuleList) or is_uniform

    return {hit.path: list(hit.module.children()) for hit in _outermost(root, accept)}


def _class_names(modules: Iterable[nn.Module]) -> list[str]:
    return list(dict.fromkeys(class_name(module) for module in modules))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
