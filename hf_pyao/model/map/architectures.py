"""Module maps: where an architecture keeps its layers, and which sub-module plays which role.

An architecture whose layers subclass transformers' ``GradientCheckpointingLayer`` needs none to be
found, and its roles are inferred (see ``role_inference``). A map says instead where to look and
which roles there are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_pyao.errors import ConfigError

logger = logging.getLogger(__name__)

ROLES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp_up",
    "mlp_act",
    "mlp_down",
    "router",
    "experts",
    "expert_fc1",
    "moe_act",
    "expert_fc2",
)
"""Usual role names, in forward order; the names of Megatron-Core where it has one. A map may leave
some out, and may have others of its own. ``experts`` is the fused module of all experts, where
these are no modules with linear layers of their own."""


@dataclass(frozen=True, kw_only=True)
class ModuleMap:
    """Where the layers of one architecture are, and what the parts of a layer do.

    Raises:
        ConfigError: a path or role is malformed, or a path is given to two roles.
    """

    layers: Sequence[str]
    """Dotted paths of the containers (ModuleList, ModuleDict, Sequential) whose elements are the
    layers, matched as a suffix: ``"decoder.layers"`` fits ``model.decoder.layers`` too."""
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Role -> paths of sub-modules inside one layer. A path stands for what that module saves
    itself and what modules below it save, unless a longer path of another role claims them. ``""``
    is what the layer saves itself, and nothing below it. Without any, roles are inferred."""
    optional: Sequence[str] = ()
    """Paths of ``roles`` that a layer may lack (cross-attention, a fused activation)."""

    def __post_init__(self) -> None:
        """Check every path, and copy what the caller may change; see the class docstring."""
        layers = _checked_paths("layers", self.layers)
        if not layers or not isinstance(self.roles, Mapping):
            raise _malformed(
                f"layers is {layers} and roles {self.roles!r}; expected at least one path of a "
                "list, and a dict, role -> paths"
            )
        roles = {
            role: _checked_paths(f"roles[{role!r}]", paths, may_be_layer=True)
            for role, paths in self.roles.items()
        }
        if odd := [role for role in roles if not str(role).isidentifier()]:
            raise _malformed(f"{odd[0]!r} is no role name; expected one such as 'mlp_act'")
        owner: dict[str, str] = {}
        for role, path in ((role, path) for role, paths in roles.items() for path in paths):
            if (other := owner.setdefault(path, role)) != role:
                raise _malformed(
                    f"path {path!r} is given to the roles {other!r} and {role!r}; what a module "
                    "saves has one role"
                )
        optional = _checked_paths("optional", self.optional, may_be_layer=True)
        if unclaimed := [path for path in optional if path not in owner]:
            raise _malformed(f"optional paths {unclaimed} belong to no role of this map")
        for name, value in (("layers", layers), ("roles", roles), ("optional", optional)):
            object.__setattr__(self, name, value)


def _checked_paths(name: str, paths: object, *, may_be_layer: bool = False) -> tuple[str, ...]:
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise _malformed(
            f"{name} is {paths!r}; expected a list or tuple of paths, such as ('mlp.fc1',)"
        )
    for path in paths:
        is_path = isinstance(path, str) and re.fullmatch(r"[\w-]+(\.[\w-]+)*", path)
        if not is_path and not (may_be_layer and path == ""):
            raise _malformed(
                f"{name} holds {path!r}; expected a dotted path without wildcards, such as "
                "'decoder.layers' or 'mlp.fc1'"
            )
    return tuple(paths)


def _malformed(message: str) -> ConfigError:
    return ConfigError(f"ModuleMap: {message}.", key="module-map")


# [Note: What a role covers]
# A saved tensor belongs to the innermost module that runs when autograd saves it. So core_attn is
# what the attention module saves outside its projections (rotary products, q, k, v, the output, its
# dropout mask), and in a gated MLP, mlp_act is the activation and the product that ``mlp`` makes.
# OPT calls dropout as a function in the layer itself, once after attention and once after the MLP:
# those masks cannot be told apart by module and have no role ("." selects them, see module_roles).
# The experts of a mixture are one fused module in current transformers, whose two products save
# under the same name: the expert roles cannot be told apart by module either. They are one role,
# ``experts``, and moe_act is the activation module that they call.

# The one piece of module state: a map must be known before the model that needs it is attached,
# often through a Trainer that offers no place to hand one over.
_registered_maps: dict[str, ModuleMap] = {}


def register_module_map(architecture: str, module_map: ModuleMap) -> None:
    """Teach hf_pyao an architecture, for this process; call it before attaching.

    *architecture* is ``config.model_type``, or the name of the model's class or of a base class of
    it. A class name wins over a model type, and a map over what is known of layers and roles
    otherwise, or was registered under the same name before.

    ```python
    import torch
    from torch import nn

    from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(self.act(self.up(x)))

    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    register_module_map("MyModel", ModuleMap(layers=("blocks",), roles={"mlp_act": ("act",)}))
    model = MyModel().train()
    with attach(model, PyAOConfig(policy="modules", modules=("mlp_act",))) as offloader:
        model(torch.randn(1024, 64)).backward()
    print(offloader)
    ```

    For a single model, or for layers in no list, ``PyAOConfig(layers=...)`` names them without
    registering anything.

    Raises:
        ConfigError: *architecture* is no name, or *module_map* no :class:`ModuleMap`.
    """
    is_named = isinstance(architecture, str) and architecture.strip()
    if not is_named or not isinstance(module_map, ModuleMap):
        raise ConfigError(
            f"register_module_map got {architecture!r} and a {type(module_map).__name__}; expected "
            "config.model_type or a model class name, and ModuleMap(layers=('path.to.the.list',)).",
            key="module-map",
        )
    if _registered_maps.get(architecture, module_map) != module_map:
        logger.info("the module map of %r is replaced", architecture)
    _registered_maps[architecture] = module_map


def module_map_of(model: nn.Module) -> tuple[str, ModuleMap] | None:
    """Return the name and the registered map of an (unwrapped) model's architecture, or None."""
    # FSDP2's renamed class (FSDPOPTModel) has the original one among its bases.
    bases = type(model).__mro__
    names = [cls.__name__ for cls in bases[: bases.index(nn.Module)]]
    if model_type := model_type_of(model):
        names.append(model_type)
    return next(
        ((name, _registered_maps[name]) for name in names if name in _registered_maps), None
    )


def model_type_of(model: nn.Module) -> str | None:
    """Return ``model.config.model_type``, or None for a model that has none."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type if isinstance(model_type, str) and model_type else None
