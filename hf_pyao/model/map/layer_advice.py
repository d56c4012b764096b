"""What to tell a user whose model's layers were not found."""

from __future__ import annotations

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
    lists = list(outermost(root, _may_hold_layers))
    if not lists:
        return (
            f"found no layers in {name}: {cause}. Nor is there a ModuleList, ModuleDict or "
            "Sequential inside it that could hold them. Name the modules that are its layers with "
            "PyAOConfig(layers=...), or put the repeated blocks of the model into a ModuleList, "
            "then name its path with register_module_map."
        )
    rows = "\n".join(
        f"  {hit.path}: {len(list(hit.module.children()))} x {', '.join(_class_names(hit.module))}"
        for hit in lists
    )
    sizes = {hit.path: sum(p.numel() for p in hit.module.parameters()) for hit in lists}
    least = _SHARE_OF_LARGEST * max(sizes.values())
    paths = tuple(path for path, size in sizes.items() if size >= least)
    return (
        f"found no layers in {name}: {cause}. Its module lists are:\n{rows}\n"
        "Name the ones that hold the layers, for example in the configuration:\n"
        f"  PyAOConfig(layers={tuple(f'{path}.*' for path in paths)!r})\n"
        "or once for the architecture, before attaching:\n"
        "  from hf_pyao import ModuleMap, register_module_map\n"
        f"  register_module_map({model_type_of(root) or name!r}, ModuleMap(layers={paths!r}))"
    )


def _may_hold_layers(hit: Hit) -> bool:
    """Accept lists of modules; dicts and sequentials if they are uniform.

    A list of lists (Funnel's blocks) is none, the lists in it are.
    """
    module = hit.module
    if not hit.parents or not isinstance(module, CONTAINERS) or len(module) == 0:
        return False
    if not all(map(is_called, module.children())):
        return False
    is_uniform = len(module) > 1 and len(_class_names(module)) == 1
    return isinstance(module, nn.ModuleList) or is_uniform


def _class_names(container: nn.Module) -> list[str]:
    return list(dict.fromkeys(map(class_name, container.children())))
