"""Module maps: where an architecture keeps its layers, and which sub-module plays which role.

An architecture whose layers subclass transformers' ``GradientCheckpointingLayer`` needs no row here
to be found, and its roles are inferred (see ``role_inference``). A row says instead where to look
and which roles there are. To add one, write it next to its likes: the tests pick it up.
"""

from __future__ import annotations

import dataclasses
import logging
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
        object.__setattr__(self, "layers", _checked_paths("layers", self.layers))
        if not self.layers:
            raise ConfigError(
                "ModuleMap.layers is empty; expected at least one path of a list.", key="module-map"
            )
        if not isinstance(self.roles, Mapping):
            raise ConfigError(
                f"ModuleMap.roles is {self.roles!r}; expected a dict, role -> paths.",
                key="module-map",
            )
        owner: dict[str, str] = {}
        roles: dict[str, tuple[str, ...]] = {}
        for role, paths in self.roles.items():
            if not isinstance(role, str) or not role.isidentifier():
                raise ConfigError(
                    f"{role!r} is no role name; expected one such as 'mlp_act'.", key="module-map"
                )
            roles[role] = _checked_paths(f"roles[{role!r}]", paths, may_be_layer=True)
            for path in roles[role]:
                if path in owner:
                    raise ConfigError(
                        f"path {path!r} is given to the roles {owner[path]!r} and {role!r}; "
                        "what a module saves has one role.",
                        key="module-map",
                    )
                owner[path] = role
        optional = _checked_paths("optional", self.optional, may_be_layer=True)
        object.__setattr__(self, "optional", optional)
        if unclaimed := [path for path in self.optional if path not in owner]:
            raise ConfigError(
                f"optional paths {unclaimed} belong to no role of this map.", key="module-map"
            )
        object.__setattr__(self, "roles", roles)


def _checked_paths(name: str, paths: object, *, may_be_layer: bool = False) -> tuple[str, ...]:
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ConfigError(
            f"ModuleMap.{name} is {paths!r}; expected a list or tuple of paths, such as "
            "('mlp.fc1',).",
            key="module-map",
        )
    for path in paths:
        is_layer = may_be_layer and path == ""
        if not isinstance(path, str) or not (is_layer or all(_is_part(p) for p in path.split("."))):
            raise ConfigError(
                f"ModuleMap.{name} holds {path!r}; expected a dotted path without wildcards, "
                "such as 'decoder.layers' or 'mlp.fc1'.",
                key="module-map",
            )
    return tuple(paths)


def _is_part(part: str) -> bool:
    return part.replace("_", "a").replace("-", "a").isalnum()


# [Note: What a role covers]
# A saved tensor belongs to the innermost module that runs when autograd saves it. So core_attn is
# what the attention module saves outside its projections (rotary products, q, k, v, the output, its
# dropout mask), and in a gated MLP, mlp_act is the activation and the product that ``mlp`` makes.
# OPT calls dropout as a function in the layer itself, once after attention and once after the MLP:
# those masks cannot be told apart by module and have no role ("." selects them, see module_map).
# The experts of a mixture are one fused module in current transformers, whose two products save
# under the same name: the expert roles cannot be told apart by module either. They are one role,
# ``experts``, and moe_act is the activation module that they call. No mixture has a row: its roles
# are inferred.
_OPT = ModuleMap(
    layers=("decoder.layers",),
    roles={
        "attn_norm": ("self_attn_layer_norm",),
        "qkv_linear": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "core_attn": ("self_attn",),
        "attn_proj": ("self_attn.out_proj",),
        "mlp_norm": ("final_layer_norm",),
        "mlp_up": ("fc1",),
        "mlp_act": ("activation_fn",),
        "mlp_down": ("fc2",),
    },
)
_GPT2 = ModuleMap(
    layers=("h",),
    roles={
        "attn_norm": ("ln_1", "ln_cross_attn"),
        "qkv_linear": ("attn.c_attn", "crossattention.c_attn", "crossattention.q_attn"),
        "core_attn": ("attn", "crossattention"),
        "attn_proj": (
            "attn.c_proj",
            "attn.resid_dropout",
            "crossattention.c_proj",
            "crossattention.resid_dropout",
        ),
        "mlp_norm": ("ln_2",),
        "mlp_up": ("mlp.c_fc",),
        "mlp_act": ("mlp", "mlp.act"),
        "mlp_down": ("mlp.c_proj", "mlp.dropout"),
    },
    # Only there with add_cross_attention=True.
    optional=(
        "ln_cross_attn",
        "crossattention",
        "crossattention.c_attn",
        "crossattention.q_attn",
        "crossattention.c_proj",
        "crossattention.resid_dropout",
    ),
)
_LLAMA = ModuleMap(
    layers=("layers",),
    roles={
        "attn_norm": ("input_layernorm",),
        "qkv_linear": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "core_attn": ("self_attn",),
        "attn_proj": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_act": ("mlp", "mlp.act_fn"),
        "mlp_down": ("mlp.down_proj",),
    },
    # Liger's MLP has no activation module: it does activation and product in the MLP itself.
    optional=("mlp.act_fn",),
)
_PHI3 = dataclasses.replace(
    _LLAMA,
    roles={
        **_LLAMA.roles,
        "qkv_linear": ("self_attn.qkv_proj",),
        "attn_proj": ("self_attn.o_proj", "resid_attn_dropout"),
        "mlp_up": ("mlp.gate_up_proj",),
        "mlp_act": ("mlp", "mlp.activation_fn"),
        "mlp_down": ("mlp.down_proj", "resid_mlp_dropout"),
    },
    optional=("mlp.activation_fn",),
)
_GPT_NEOX = ModuleMap(
    layers=("layers",),
    roles={
        "attn_norm": ("input_layernorm",),
        "qkv_linear": ("attention.query_key_value",),
        "core_attn": ("attention",),
        "attn_proj": ("attention.dense", "post_attention_dropout"),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp_up": ("mlp.dense_h_to_4h",),
        "mlp_act": ("mlp", "mlp.act"),
        "mlp_down": ("mlp.dense_4h_to_h", "post_mlp_dropout"),
    },
)

MODULE_MAPS: Mapping[str, ModuleMap] = {
    "gemma": _LLAMA,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "opt": _OPT,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,  # its q_norm and k_norm lie below self_attn, hence in core_attn
}
"""The maps that come with hf_pyao, by ``config.model_type``."""

# The one piece of module state: a map must be known before the model that needs it is attached,
# often through a Trainer that offers no place to hand one over.
_registered_maps: dict[str, ModuleMap] = {}


def register_module_map(architecture: str, module_map: ModuleMap) -> None:
    """Teach hf_pyao an architecture, for this process; call it before attaching.

    *architecture* is ``config.model_type``, or the name of the model's class or of a base class of
    it. A class name wins over a model type, and a registered map over one that comes with hf_pyao
    or was registered under the same name before.

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
    if not isinstance(architecture, str) or not architecture.strip():
        raise ConfigError(
            f"architecture is {architecture!r}; expected config.model_type or a model class name.",
            key="module-map",
        )
    if not isinstance(module_map, ModuleMap):
        raise ConfigError(
            f"the map for {architecture!r} is a {type(module_map).__name__}; expected "
            "ModuleMap(layers=('path.to.the.list',)).",
            key="module-map",
        )
    if _registered_maps.get(architecture, MODULE_MAPS.get(architecture, module_map)) != module_map:
        logger.info("the module map of %r is replaced", architecture)
    _registered_maps[architecture] = module_map


def module_map_of(model: nn.Module) -> tuple[str, ModuleMap] | None:
    """Return the name and the map of an (unwrapped) model's architecture, or None."""
    # FSDP2's renamed class (FSDPOPTModel) has the original one among its bases.
    bases = type(model).__mro__
    names = [cls.__name__ for cls in bases[: bases.index(nn.Module)]]
    if model_type := model_type_of(model):
        names.append(model_type)
    known = {**MODULE_MAPS, **_registered_maps}
    return next(((name, known[name]) for name in names if name in known), None)


def model_type_of(model: nn.Module) -> str | None:
    """Return ``model.config.model_type``, or None for a model that has none."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type if isinstance(model_type, str) and model_type else None
