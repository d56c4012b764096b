"""What to tell a user whose model's layers were not found."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from torch import nn

from hf_pyao.model.map.architectures import ModuleMap, model_type_of
from hf_pyao.model.map.module_walk import CONTAINERS, Hit, is_called, outermost
from hf_pyao.model.map.wrappers import class_name

_SHARE_OF_LARGEST = 0.1
"""A list with so many of the largest one's parameters is suggested beside it: encoder and decoder,
or attention and MLP, where an architecture keeps these in lists of their own."""


def no_layers_message(root: nn.Module, how: str, module_map: ModuleMap | None) -> str:
    """Say that no layers were found, list the candidates, and show two remedies that work."""
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
            "Sequential inside it that could hold them. Name the modules that are its layers with "
            "PyAOConfig(layers=...), or put the repeated blocks of the model into a ModuleList, "
            "then name its path with register_module_map."
        )
    rows = "\n".join(
        f"  {hit.path}: {len(_elements(hit))} x {', '.join(_class_names(_elements(hit)))}"
        for hit in lists
    )
    sizes = [_num_parameters(hit.module) for hit in lists]
    chosen = [
        hit
        for hit, size in zip(lists, sizes, strict=True)
        if size >= _SHARE_OF_LARGEST * max(sizes)
    ]
    bypassed = [hit for hit in chosen if _bypasses_hooks(hit)]
    patterns = tuple(f"{hit.path}.*.*" if hit in bypassed else f"{hit.path}.*" for hit in chosen)
    message = (
        f"found no layers in {name}: {cause}. Its module lists are:\n{rows}\n"
        "Name the ones that hold the layers, for example in the configuration:\n"
        f"  PyAOConfig(layers={patterns!r})"
    )
    if bypassed:
        return (
            f"{message}\n(The elements of {bypassed[0].path} are run by their `forward`, which "
            "goes around hooks; the modules in them are called.)"
        )
    paths = tuple(hit.path for hit in chosen)
    return (
        f"{message}\nor once for the architecture, before attaching:\n"
        "  from hf_pyao import ModuleMap, register_module_map\n"
        f"  register_module_map({model_type_of(root) or name!r}, ModuleMap(layers={paths!r}))"
    )


def _candidates(root: nn.Module) -> list[Hit]:
    """Return the outermost lists of modules; dicts and sequentials if they are uniform.

    A list of lists (Funnel's blocks) is no candidate, the lists in it are.
    """

    def accept(hit: Hit) -> bool:
        module = hit.module
        if not hit.parents or not isinstance(module, CONTAINERS) or len(module) == 0:
            return False
        if not all(map(is_called, module.children())):
            return False
        is_uniform = len(module) > 1 and len(_class_names(module.children())) == 1
        return isinstance(module, nn.ModuleList) or is_uniform

    return list(outermost(root, accept))


def _bypasses_hooks(hit: Hit) -> bool:
    """Guess whether the model runs a list's elements by ``forward``, as SqueezeBERT does.

    Only words depend on it, so reading the source of the module that holds the list is enough.
    """
    owner = next(parent for parent in reversed(hit.parents) if is_called(parent))
    try:
        source = inspect.getsource(type(owner).forward)
    except (OSError, TypeError):
        return False
    return re.search(r"(?<!super\(\))\.forward\(", source) is not None


def _elements(hit: Hit) -> list[nn.Module]:
    return list(hit.module.children())


def _class_names(modules: Iterable[nn.Module]) -> list[str]:
    return list(dict.fromkeys(class_name(module) for module in modules))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
