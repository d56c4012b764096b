"""Find the layers of a model, and give names to what is inside one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import nn

from hf_pyao.errors import ConfigError, NoLayersFoundError, nearest
from hf_pyao.model.map.architectures import ModuleMap, module_map_of
from hf_pyao.model.map.found_layers import FoundLayers, Roles
from hf_pyao.model.map.layer_advice import no_layers_message
from hf_pyao.model.map.layer_patterns import find_named_layers
from hf_pyao.model.map.module_walk import CONTAINERS, Accept, Hit, is_called, outermost, stack_of
from hf_pyao.model.map.role_inference import infer_by_layer
from hf_pyao.model.map.wrappers import named_submodules, unwrap_model


def find_layers(
    model: nn.Module, named: Sequence[str] = (), *, field: str = "layers"
) -> FoundLayers:
    """Find the layers of *model*, wrapped or not.

    Where *named* is empty, a registered module map of the architecture decides. Without one the
    layers are the outermost instances of transformers' ``GradientCheckpointingLayer``: the blocks
    of a vision tower or an encoder count, the experts inside a layer do not.

    Roles are those of the map. Where none says any, they are inferred layer by layer.

    Args:
        model: a model, wrapped or not.
        named: ``PyAOConfig.layers``: names or patterns of the modules that are the layers, see
            :func:`~hf_pyao.model.map.layer_patterns.find_named_layers`.
        field: what messages call that.

    Raises:
        NoLayersFoundError: nothing was found; the message lists the module lists of the model and
            the calls that name the layers.
        ConfigError: *named* cannot be layers, or a layer lacks a path of its module map.
        ConflictError: the model is wrapped in ``nn.DataParallel``.
    """
    root = unwrap_model(model)
    known = module_map_of(root)
    architecture, module_map = known if known is not None else (None, None)
    if named:
        how = "as `layers` names them"
        hits = find_named_layers(root, named, field)
        is_mapped = module_map is not None and all(map(_element_of(module_map.layers), hits))
        module_map = module_map if is_mapped else None
    elif module_map is not None:
        how = f"explicit map for {architecture!r}"
        hits = list(outermost(root, _element_of(module_map.layers)))
    else:
        how = "GradientCheckpointingLayer rule"
        hits = list(outermost(root, _is_checkpointing_layer))
    if not hits:
        raise NoLayersFoundError(no_layers_message(root, how, module_map))
    layers = tuple((hit.path, hit.module) for hit in hits)
    roles: Mapping[str, Roles]
    if module_map is not None and module_map.roles:
        roles = {fqn: _roles_of(module_map, fqn, layer) for fqn, layer in layers}
    else:
        roles = infer_by_layer(layers)
    return FoundLayers(layers=layers, stack=stack_of(hits, root), roles=roles, how=how)


def _roles_of(module_map: ModuleMap, fqn: str, layer: nn.Module) -> Roles:
    """Return the map's roles in one layer, without optional paths that it lacks.

    Another path must not be missing: a renamed module would silently turn its role into a selection
    of nothing.
    """
    present = {path: None for path, _ in named_submodules(layer)}
    for role, paths in module_map.roles.items():
        for path in paths:
            if path not in present and path not in module_map.optional:
                raise ConfigError(
                    f"layer {fqn!r} has no sub-module {path!r}, which its module map names for the "
                    f"role {role!r}{nearest(path, present) or ';'} it has {', '.join(present)}. "
                    "Correct the path with register_module_map, or list it in ModuleMap.optional "
                    "if a layer may lack it.",
                    key="selects-nothing",
                )
    return {
        role: tuple(path for path in paths if path in present)
        for role, paths in module_map.roles.items()
    }


def _element_of(suffixes: Sequence[str]) -> Accept:
    """Accept the elements of the containers that *suffixes* name, and those of lists inside."""

    def accept(hit: Hit) -> bool:
        path = hit.path
        if not is_called(hit.module):  # a list in a list: its elements are the layers
            return False
        for parent in reversed(hit.parents):
            path = path.rpartition(".")[0]
            if not isinstance(parent, CONTAINERS):
                return False
            if any(f".{path}".endswith(f".{suffix}") for suffix in suffixes):
                return True
        return False

    return accept


def is_made_to_run_again(layer: nn.Module) -> bool:
    """Say whether *layer*, wrapped or not, is one that transformers checkpoint."""
    # Asking for a module that is already imported, instead of importing it, keeps plain torch
    # models free of transformers: without that module no instance of the class can exist.
    modeling_layers = sys.modules.get("transformers.modeling_layers")
    return modeling_layers is not None and isinstance(
        unwrap_model(layer), modeling_layers.GradientCheckpointingLayer
    )


def _is_checkpointing_layer(hit: Hit) -> bool:
    return is_made_to_run_again(hit.module)
