"""From role names and module names to the sub-modules of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_pyao.errors import ConfigError, nearest
from hf_pyao.model.map.architectures import ROLES
from hf_pyao.model.map.found_layers import FoundLayers, Roles
from hf_pyao.model.map.module_walk import is_called
from hf_pyao.model.map.wrappers import named_submodules

LAYER_ITSELF = "."
"""The name, in a selection, of what a layer saves itself, outside all of its sub-modules."""

_MAX_PATHS_IN_MESSAGE = 16
_SAY_ROLES = "Or say which sub-modules play which role with register_module_map."

_INSTEAD = {
    "attn_norm": ("mlp_norm",),
    "qkv_linear": ("core_attn",),
    "attn_proj": ("core_attn",),
    "mlp_norm": ("attn_norm",),  # one norm for both
    "mlp_up": ("expert_fc1", "experts"),
    "mlp_act": ("moe_act", "experts", "mlp_up"),
    "mlp_down": ("expert_fc2", "experts"),
    "experts": ("expert_fc1",),
    "expert_fc1": ("experts", "mlp_up"),
    "moe_act": ("experts", "mlp_act"),
    "expert_fc2": ("experts", "mlp_down"),
}
"""Role -> what does its work in an architecture that lacks it, the nearest first."""


def check_roles(found: FoundLayers) -> None:
    """Check that every layer has every sub-module that its roles name, and that it can be called.

    A path may be missing only if the map lists it as optional: a renamed module must not silently
    turn its role into a selection of nothing. Nor may a role that was inferred be a list of
    modules, which is never called and so saves nothing itself.

    Raises:
        ConfigError: a path is missing; names the layer, path, role, and the nearest sub-module.
    """
    for fqn, layer in found.layers:
        modules = dict(named_submodules(layer))
        for role, paths in found.roles_of(fqn).items():
            for path in paths:
                if path not in modules and path not in found.optional:
                    raise _missing(fqn, path, role, list(modules), found.how)
                if not found.roles and not is_called(modules[path]):
                    raise ConfigError(
                        f"the role {role!r} was inferred to be {path!r} of layer {fqn!r}, a list "
                        f"of modules that is never called. {_SAY_ROLES}",
                        key="modules-overlap",
                    )


def _missing(fqn: str, path: str, role: str, present: Sequence[str], how: str) -> ConfigError:
    return ConfigError(
        f"layer {fqn!r} has no sub-module {path!r}, which the {how} names for the role "
        f"{role!r}{nearest(path, present) or ';'} it has {_listing(present)}. Correct the path "
        "with register_module_map, or list it in ModuleMap.optional if a layer may lack it.",
        key="selects-nothing",
    )


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


def resolve_selection(names: Sequence[str], layer: nn.Module, roles: Roles) -> frozenset[str]:
    """Return the paths of the sub-modules of one layer that *names* select.

    A name is one of:

    - a role: the sub-modules that have it, by the map or inferred, and what is below them with no
      other role;
    - a sub-module's path inside the layer, where ``*``, ``?`` and ``[...]`` are wildcards (``*``
      crosses dots): that sub-module and everything below it;
    - ``"."``: what the layer saves itself, outside its sub-modules.

    A role wins over a sub-module of the same name. ``""`` in the result is the layer itself.

    Raises:
        ConfigError: a name selects nothing in this layer.
    """
    selected: set[str] = set()
    for name in names:
        paths = _select(name, layer, roles)
        if not paths:
            raise _nothing_selected(name, [("", layer)], roles)
        selected |= paths
    return frozenset(selected)


def resolve_selections(
    names: Sequence[str], found: FoundLayers, *, field: str = "modules", also: Sequence[str] = ()
) -> dict[str, frozenset[str]]:
    """Do :func:`resolve_selection` for every layer of a model; layer fqn -> selected paths.

    Layers may differ (encoder and decoder, attention and state-space, dense and expert layers), so
    a name need not select something in every one of them.

    Args:
        names: roles, or names of sub-modules with ``*`` as wildcard.
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
            raise _nothing_selected(name, found.layers, all_roles, field, also)
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
    name: str,
    layers: Sequence[tuple[str, nn.Module]],
    roles: Roles,
    field: str = "modules",
    also: Sequence[str] = (),
) -> ConfigError:
    paths = list(dict.fromkeys(path for _, layer in layers for path in _paths(layer)))
    where = f"any of the {len(layers)} layers" if len(layers) > 1 else "the layer"
    fqn_way = f"Name sub-modules of a layer instead: {_listing(paths)}."
    if name in roles:
        return ConfigError(
            f"the role {name!r} stands for {list(roles[name])}, none of which is in {where}. "
            + fqn_way,
            key="selects-nothing",
        )
    if name in ROLES:
        if not roles:
            return ConfigError(
                f"{field} names the role {name!r}, but this architecture has no module map, and "
                f"the names of its sub-modules tell no roles. {fqn_way} {_SAY_ROLES}",
                key="selects-nothing",
            )
        instead = next((role for role in _INSTEAD.get(name, ()) if role in roles), None)
        hint = f"; did you mean {instead!r}?" if instead else "."
        return ConfigError(
            f"{field} names the role {name!r}, which selects nothing in {where}: this architecture "
            f"has no such role{hint} known roles: {', '.join(roles)}. {fqn_way} {_SAY_ROLES}",
            key="selects-nothing",
        )
    relative = [".".join(name.split(".")[start:]) for start in range(1, name.count(".") + 1)]
    inside = next((r for r in relative if any(fnmatchcase(p, r) for p in paths if p)), None)
    if inside is not None:
        return ConfigError(
            f"{field} names {name!r}; names are relative to a layer and hold for all layers: "
            f"write {inside!r}.",
            key="selects-nothing",
        )
    hint = nearest(name, [*also, *roles, *paths]) or ";"
    known = f"known roles: {', '.join(roles)}; " if roles else "this architecture has no roles; "
    return ConfigError(
        f"{field} names {name!r}, which selects nothing in {where}{hint} {known}"
        f"sub-modules of a layer: {_listing(paths)}.",
        key="selects-nothing",
    )


def _listing(paths: Iterable[str]) -> str:
    named = [path for path in paths if path]
    rest = len(named) - _MAX_PATHS_IN_MESSAGE
    return ", ".join(named[:_MAX_PATHS_IN_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
