"""Roles of architectures, against tables written by hand."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_pyao import PyAOConfig, attach
from hf_pyao.model.map.architectures import ROLES
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.module_roles import resolve_selections
from hf_pyao.model.map.role_inference import infer_roles, parts_of
from hf_pyao.model.map.role_names import Kind
from tests.helpers import gradients_of
from tests.helpers.role_tables import BEFORE_5, FIRST, GPT2_CROSS, LAST, SINCE_5
from tests.model.map.models import VOCAB, build

HAS_FUSED_EXPERTS = int(transformers.__version__.partition(".")[0]) >= 5

old_layout = pytest.mark.skipif(not HAS_FUSED_EXPERTS, reason="has other modules before 5.0")


def cases(*model_types: str, thorough: tuple[str, ...] = ()) -> list[Any]:
    marks: dict[str, list[pytest.MarkDecorator]] = defaultdict(list)
    for name in SINCE_5:
        marks[name].append(old_layout)
    for name in thorough:
        marks[name].append(pytest.mark.thorough)
    return [pytest.param(name, marks=marks[name], id=name) for name in model_types or sorted(FIRST)]


def expected_roles(model_type: str, found: FoundLayers) -> dict[str, Mapping[str, set[str]]]:
    """Return layer fqn -> role -> paths, from the tables."""
    old = {} if HAS_FUSED_EXPERTS else BEFORE_5
    first = old.get(model_type, FIRST[model_type])
    last = LAST.get(model_type, first)
    half = len(found.layers) // 2
    return {fqn: last if i >= half else first for i, (fqn, _) in enumerate(found.layers)}


# ---- which roles there are -----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", cases())
def test_roles_are_those_of_the_table(model_type: str) -> None:
    found = find_layers(build(model_type))
    expected = expected_roles(model_type, found)
    for fqn, _ in found.layers:
        roles = {role: set(paths) for role, paths in found.roles_of(fqn).items()}
        assert roles == expected[fqn], fqn
        assert list(found.roles_of(fqn)) == [role for role in ROLES if role in roles]


def test_cross_attention_has_the_roles_of_attention() -> None:
    layer = find_layers(build("gpt2", add_cross_attention=True)).layers[0][1]
    inferred = {role: set(paths) for role, paths in infer_roles(parts_of(layer)).items()}
    assert inferred == GPT2_CROSS


# PEFT 0.21 reads a name that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_keeps_the_roles() -> None:
    import peft

    base = build("gemma2")
    before = find_layers(base).roles
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, lora_dropout=0.1)
    found = find_layers(peft.get_peft_model(base, config))
    assert found.roles == before
    selected = resolve_selections(["mlp_down"], found)["model.layers.0"]
    assert "mlp.down_proj.lora_A.default" in selected


def test_wrapped_parts_keep_the_roles() -> None:
    model = build("olmo2")
    before = find_layers(model).roles
    layer = model.get_submodule("model.layers.0")
    layer.mlp = checkpoint_wrapper(layer.mlp)
    layer.mlp.act_fn = checkpoint_wrapper(layer.mlp.act_fn)
    layer.input_layernorm = nn.Identity()  # of no use, and no norm
    assert find_layers(model).roles == before


# ---- layouts that no model of this release has ----------------------------------------------------

OTHER_LAYOUTS: dict[str, tuple[str, dict[str, str]]] = {
    # "path:kind ..." with linear as default; role -> paths
    "experts in a list (transformers 4)": (
        "self_attn:attention self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "block_sparse_moe:other block_sparse_moe.gate block_sparse_moe.experts:container "
        "block_sparse_moe.experts.0:other block_sparse_moe.experts.0.w1 "
        "block_sparse_moe.experts.0.w2 block_sparse_moe.experts.0.w3 "
        "block_sparse_moe.experts.0.act_fn:activation",
        {
            "qkv_linear": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "core_attn": "self_attn",
            "attn_proj": "self_attn.o_proj",
            "router": "block_sparse_moe block_sparse_moe.gate",
            "expert_fc1": "block_sparse_moe.experts.0.w1 block_sparse_moe.experts.0.w3",
            "moe_act": "block_sparse_moe.experts.0 block_sparse_moe.experts.0.act_fn",
            "expert_fc2": "block_sparse_moe.experts.0.w2",
        },
    ),
    "ViT (transformers 4)": (
        "attention:attention attention.attention:attention attention.attention.query "
        "attention.attention.key attention.attention.value attention.output:other "
        "attention.output.dense attention.output.dropout:dropout intermediate:other "
        "intermediate.dense intermediate.intermediate_act_fn:activation output:other output.dense "
        "output.dropout:dropout layernorm_before:norm layernorm_after:norm",
        {
            "attn_norm": "layernorm_before",
            "qkv_linear": "attention.attention.query attention.attention.key "
            "attention.attention.value",
            "core_attn": "attention.attention",
            "attn_proj": "attention.output.dense attention.output.dropout",
            "mlp_norm": "layernorm_after",
            "mlp_up": "intermediate.dense",
            "mlp_act": "intermediate intermediate.intermediate_act_fn",
            "mlp_down": "output.dense output.dropout",
        },
    ),
    "an activation that is a function, in an MLP of its own": (
        "mlp:other mlp.up_proj mlp.down_proj",
        {"mlp_up": "mlp.up_proj", "mlp_act": "mlp", "mlp_down": "mlp.down_proj"},
    ),
    "an activation that is a function, in the layer": (
        "fc1 fc2",
        {"mlp_up": "fc1", "mlp_down": "fc2"},
    ),
    "attention in the layer": (
        "q_proj k_proj v_proj out_proj fc1 act:activation fc2",
        {
            "qkv_linear": "q_proj k_proj v_proj",
            "mlp_up": "fc1",
            "mlp_act": "act",
            "mlp_down": "fc2",
        },
    ),
    "attention with a gate": (
        "self_attn:attention self_attn.q_proj self_attn.gate_proj self_attn.o_proj mlp:other "
        "mlp.gate_proj mlp.down_proj",
        {
            "qkv_linear": "self_attn.q_proj",
            "core_attn": "self_attn",
            "attn_proj": "self_attn.o_proj",
            "mlp_up": "mlp.gate_proj",
            "mlp_act": "mlp",
            "mlp_down": "mlp.down_proj",
        },
    ),
    "attention known by its class alone": (
        "attn:attention attn.out_proj mlp:other mlp.fc1 mlp.fc2",
        {
            "core_attn": "attn",
            "attn_proj": "attn.out_proj",
            "mlp_up": "mlp.fc1",
            "mlp_act": "mlp",
            "mlp_down": "mlp.fc2",
        },
    ),
    "a state-space mixer": (
        "norm:norm mixer:other mixer.act:activation mixer.in_proj mixer.out_proj",
        {},
    ),
}


@pytest.mark.parametrize(("parts", "roles"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_other_layouts(parts: str, roles: dict[str, str]) -> None:
    kinds: dict[str, Kind] = {}
    for part in parts.split():
        path, _, kind = part.partition(":")
        kinds[path] = kind or "linear"  # type: ignore[assignment]
    inferred = {role: set(paths) for role, paths in infer_roles(kinds).items()}
    assert inferred == {role: set(paths.split()) for role, paths in roles.items()}


# ---- what is moved -------------------------------------------------------------------------------


def batch_for(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        labels = torch.tensor([0, 1])
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}
    ids = torch.randint(3, VOCAB, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of one forward and backward."""
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    model(**batch).loss.backward()
    return gradients_of(model)


class Held:
    """What autograd holds of a saved tensor in :func:`saved_bytes`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: nn.Module, found: FoundLayers, batch: Any) -> dict[tuple[str, str], int]:
    """Return (layer, path) -> bytes that this sub-module is the first to save, without hf_pyao.

    What several layers save (rotary tables, masks, the encoder's states) is left out. What autograd
    forgets before it is saved again (indices of a top-k whose values no one uses) counts twice.
    """
    running: list[tuple[str, str]] = []
    owners: dict[int, list[tuple[str, str]]] = {}
    layers: dict[int, set[str]] = {}
    held: dict[int, weakref.WeakSet[Held]] = {}
    kept: dict[int, torch.UntypedStorage] = {}  # so that no address is used twice
    static = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def leave(*_: Any) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> Held:
        holder = Held(tensor)
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if running and key not in static:
            kept[key] = storage
            layers.setdefault(key, set()).add(running[-1][0])
            others = held.setdefault(key, weakref.WeakSet())
            if not others:
                owners.setdefault(key, []).append(running[-1])
            others.add(holder)
        return holder

    handles = []
    for fqn, layer in found.layers:
        for path, module in layer.named_modules():
            enter = lambda *_, at=(fqn, path): running.append(at)  # noqa: E731
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        loss = model(**batch).loss
    for handle in handles:
        handle.remove()
    del loss
    saved: dict[tuple[str, str], int] = defaultdict(int)
    for key, at in owners.items():
        for owner in at if len(layers[key]) == 1 else ():
            saved[owner] += kept[key].nbytes()
    return saved


def owner_of(path: str, roles: Mapping[str, set[str]]) -> str | None:
    """Return the role of the longest path of *roles* that *path* is in."""
    fitting = [
        (len(known), role)
        for role, paths in roles.items()
        for known in paths
        if f"{path}.".startswith(f"{known}.")
    ]
    return max(fitting)[1] if fitting else None


OFFLOAD_ROLES = PyAOConfig(
    min_bytes=0,
    host_memory_gib=0.1,
    keep_last_layers=0,
    window="layer",
    policy="modules",
    modules=("mlp_act",),
)
ALWAYS_SAVE = {"core_attn", "qkv_linear", "mlp_act", "mlp_norm", "experts", "moe_act"}
"""Roles that save something of their own; the input of another one may be saved before."""
ALIKE = ("gemma3_text", "granitemoe", "gptj", "mpt", "qwen3_moe", "stablelm")
"""Architectures whose likes are in the default run."""


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize("model_type", cases(thorough=ALIKE))
def test_offloads_what_the_modules_of_a_role_save(model_type: str) -> None:
    model = build(model_type)
    found = find_layers(model)
    batch = batch_for(model)
    tables = expected_roles(model_type, found)
    expected: dict[str, int] = {role: 0 for table in tables.values() for role in table}
    for (fqn, path), num_bytes in saved_bytes(model, found, batch).items():
        role = owner_of(path, tables[fqn])
        if role is not None:
            expected[role] += num_bytes
    assert all(expected[role] for role in ALWAYS_SAVE & set(expected)), expected
    reference = step(model, batch)
    for role, num_bytes in expected.items():
        config = dataclasses.replace(OFFLOAD_ROLES, modules=(role,))
        with attach(model, config) as offloader:
            gradients = step(model, batch)
            assert offloader.metrics()["offloaded_bytes"] == num_bytes, role
        assert gradients.keys() == reference.keys()
        assert all(torch.equal(gradients[name], reference[name]) for name in reference), role


@pytest.mark.parametrize("model_type", cases("gemma2", "t5", "qwen2_moe", "deepseek_v3"))
def test_recomputes_roles(model_type: str) -> None:
    model = build(model_type)
    batch = batch_for(model)
    reference = step(model, batch)
    config = dataclasses.replace(
        OFFLOAD_ROLES, modules=(), policy="all", recompute_modules=("mlp_norm", "mlp_act")
    )
    with attach(model, config) as offloader:
        gradients = step(model, batch)
        assert offloader.metrics()["recomputed_bytes"] > 0
    assert all(torch.equal(gradients[name], reference[name]) for name in reference)


# ---- what is not there ---------------------------------------------------------------------------


def test_a_role_of_some_layers_is_no_name_in_the_others() -> None:
    model = nn.ModuleList([_Block("router"), _Block("gate")])
    found = FoundLayers(
        layers=(("0", model[0]), ("1", model[1])),
        stack=model,
        roles={"0": {"mlp_up": ("up",)}, "1": {"router": ("gate",)}},
    )
    selected = resolve_selections(["router"], found)
    assert selected == {"0": frozenset(), "1": frozenset({"gate"})}


class _Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.up = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)  # type: ignore[no-any-return]
