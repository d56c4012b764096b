"""From role names and module names to the sub-modules of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_pyao.errors import ConfigError, nearest
from hf_pyao.model.map.found_layers import FoundLayers, Roles
from hf_pyao.model.map.wrappers import named_submodules

LAYER_ITSELF = "."
"""The name, in a selection, of what a layer saves itself, outside all of its sub-modules."""

_MAX_PATHS_IN_MESSAGE = 16


def role_of_submodules(layer: nn.Module, roles: Roles) -> dict[str, str]:
    """Return path -> role for the layer (``""``) and every sub-module below it that has a role.

    The longest mapped path that a sub-module lies under decides: the LoRA matrices in
    ``self_attn.q_proj`` are ``qkv_linear``, although ``self_attn`` is ``core_attn``. The path
    ``""`` covers the layer itself alone.
    """
    owner = {path: role for role, paths in roles.items() for path in paths}
    found: dict[str, str] = {}
    for path in _paths(layer):
        parents = _self_and_parents(path)
        role = next((owner[parent] for parent in parents if parent in owner), None)
        if role is not None:
            found[path] = role
    return found


def resolve_selections(
    names: Sequence[str], found: FoundLayers, *, field: str = "modules", also: Sequence[str] = ()
) -> dict[str, frozenset[str]]:
    """Return the paths of the sub-modules that *names* select; layer fqn -> paths.

    A name is one of:

    - a role: the sub-modules that have it, by the map or inferred, and what is below them with no
      other role;
    - a sub-module's path inside the layer, where ``*``, ``?`` and ``[...]`` are wildcards (``*``
      crosses dots): that sub-module and everything below it;
    - ``"."``: what the layer saves itself, outside its sub-modules.

    A role wins over a sub-module of the same name. ``""`` in the result is the layer itself. Layers
    may differ (encoder and decoder, attention and state-space, dense and expert layers), so a name
    need not select something in every one of them.

    Args:
        names: roles, or names of sub-modules.
        found: the layers.
        field: of the configuration, for messages.
        also: what else that field takes, for messages.

    Raises:
        ConfigError: a name selects nothing in any layer.
    """
    selected: dict[str, frozenset[str]] = {fqn: frozenset() for fqn, _ in found.layers}
    all_roles = found.all_roles
    for name in names:
        # A role of some layers is no sub-module's name in the others.
        none: Roles = {name: ()} if name in all_roles else {}
        by_layer = {
            fqn: _select(name, layer, {**none, **found.roles_of(fqn)})
            for fqn, layer in found.layers
        }
        if not any(by_layer.values()):
            raise _nothing_selected(name, found, field, also)
        selected = {fqn: selected[fqn] | by_layer[fqn] for fqn in selected}
    return selected


def _select(name: str, layer: nn.Module, roles: Roles) -> frozenset[str]:
    if name == LAYER_ITSELF:
        return frozenset({""})
    if name in roles:
        owner = role_of_submodules(layer, roles)
        return frozenset(path for path, role in owner.items() if role == name)
    return frozenset(
        path
        for path in _paths(layer)
        if any(fnmatchcase(parent, name) for parent in _self_and_parents(path))
    )


def _self_and_parents(path: str) -> list[str]:
    """Return ``["a.b.c", "a.b", "a"]`` for ``"a.b.c"``, and ``[""]`` for the layer itself."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _paths(layer: nn.Module) -> list[str]:
    return list(dict.fromkeys(path for path, _ in named_submodules(layer)))


def _nothing_selected(
    name: str, found: FoundLayers, field: str, also: Sequence[str]
) -> ConfigError:
    """Build the error for a name that selects nothing, with the nearest one and what there is."""
    roles = found.all_roles
    paths = list(dict.fromkeys(path for _, layer in found.layers for path in _paths(layer) if path))
    inside = [name.split(".", start)[-1] for start in range(1, name.count(".") + 1)]
    known = next((r for r in inside if any(fnmatchcase(path, r) for path in paths)), None)
    if known is not None:
        hint = f"; names are relative to a layer and hold for all layers: write {known!r}."
    else:
        hint = nearest(name, [*also, *roles, *paths]) or "."
    listed = ", ".join(paths[:_MAX_PATHS_IN_MESSAGE])
    rest = len(paths) - _MAX_PATHS_IN_MESSAGE
    return ConfigError(
        f"{field} names {name!r}, which selects nothing in any of the {len(found.layers)} layers"
        f"{hint} Known roles: {', '.join(roles) or 'none'}; sub-modules of a layer: {listed}"
        f"{f' and {rest} more' if rest > 0 else ''}. register_module_map says which of them play "
        "which role.",
        key="selects-nothing",
    )
