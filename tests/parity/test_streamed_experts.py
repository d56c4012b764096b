"""Mixtures whose experts are streamed by group train as in a plain run, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights
from hf_pyao.auto.offloader import Offloader
from hf_pyao.errors import ConflictError
from hf_pyao.model.weights import streamable
from hf_pyao.model.weights.experts import FusedExperts
from tests.engine.weights.test_streaming import BlocksSeen
from tests.helpers import HIDDEN, PRECISIONS, VOCAB, enable_checkpointing, gradients_of, tiny_batch
from tests.helpers.adapters import with_adapters
from tests.parity.test_streamed_weights import CONFIGS, check

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
}
NUM_EXPERTS = 7

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS},
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "head_dim": 8},
    "olmoe": {"num_experts": NUM_EXPERTS},
    "gpt_oss": {"num_local_experts": NUM_EXPERTS, "head_dim": 8},
    "qwen2_moe": {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": HIDDEN},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
ARE_FUSED = importlib.util.find_spec("transformers.integrations.moe") is not None
"""Experts of a layer are one parameter, and so can come in groups: from transformers 5 on."""
in_groups = pytest.mark.skipif(not ARE_FUSED, reason="transformers 4 has a module for each expert")

ATTENTION = {"target_modules": ["q_proj", "o_proj", "q_b_proj"]}


def mixture(
    model_type: str, experts: str = "grouped_mm", dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    config = AutoConfig.for_model(model_type, **{**_COMMON, **MIXTURES[model_type], **options})
    config._experts_implementation = experts  # transformers 4 has one, and does not ask
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return with_adapters(model.train(), **ATTENTION)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be of one to three experts."""
    monkeypatch.setattr(
        weights, "largest_block_bytes", lambda layers: max(e.nbytes for e in layers) // 5
    )


def streamed(model: nn.Module, **settings: Any) -> Offloader:
    settings = {"policy": "all", "min_bytes": 0, "host_memory_gib": 0.1, **settings}
    return attach(model, PyAOConfig(stream_weights=0, **settings))


@pytest.mark.sampled(every=25)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("experts", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_of_each_mixture(model_type: str, experts: str, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    model = mixture(model_type, experts, dtype)
    check(model, f"{model_type}, {experts}, {precision}", autocast)


@pytest.mark.sampled(every=29)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_under_each_configuration(experts: str, config: str, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    model = mixture("qwen3_moe", experts, dtype)
    what = f"{experts}, {config}, {precision}"
    check(model, what, autocast, **CONFIGS[config])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_with_gradient_checkpointing(experts: str, use_reentrant: bool) -> None:
    model = mixture("qwen2_moe", experts)
    inner: Any = model
    inner.enable_input_require_grads()
    enable_checkpointing(inner.base_model.model, use_reentrant=use_reentrant)
    check(model, f"{experts}, checkpointing, {use_reentrant}")


@in_groups
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_at_every_operation_two_groups_are_on_the_device_and_the_graph_holds_none(
    experts: str,
) -> None:
    model = mixture("mixtral", experts)
    with streamed(model) as offloader:
        assert offloader.weights is not None
        ring = offloader.weights.ring
        assert ring is not None
        per_layer = 8 if experts == "eager" else 7
        num_blocks = 3 * per_layer
        assert len(ring.blocks) == num_blocks
        layer_bytes = ring.blocks[0].masters.nbytes
        assert ring.slot_bytes < layer_bytes / 3
        assert f"experts in {num_blocks - 3} groups" in offloader.describe()
        uploads = [0]
        with BlocksSeen(ring) as blocks:
            for _ in range(3):
                # No activation of this batch is as large as a slot.
                loss = model(**tiny_batch(0, size=5, length=15)).loss
                assert sum(each.num_holders for each in ring.on_device) == 0, (
                    "the graph holds bytes of a frozen weight"
                )
                loss.backward()
                uploads.append(ring.num_uploads)
        assert blocks.most == 2
        assert ring.counts.num_left == 0
        assert ring.num_late_uploads == 0


@in_groups
def test_evaluation_and_generation_and_another_implementation_in_mid_run() -> None:
    model, plain = mixture("qwen3_moe"), mixture("qwen3_moe")
    ids = tiny_batch(0)["input_ids"]
    with streamed(model):
        for experts in ("grouped_mm", "batched_mm", "eager"):
            found = []
            for each in (model, plain):
                inner: Any = each
                inner.base_model.model.set_experts_implementation(experts)
                each.train()
                torch.manual_seed(0)
                loss = each(**tiny_batch(1)).loss
                loss.backward()
                each.eval()
                with torch.inference_mode():
                    generated = inner.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
                found.append((loss, generated, gradients_of(each)))
            (loss, generated, gradients), (expected, expected_ids, expected_gradients) = found
            assert torch.equal(loss, expected)
            assert torch.equal(generated, expected_ids)
            assert all(torch.equal(gradients[n], g) for n, g in expected_gradients.items())


@in_groups
def test_what_needs_all_experts_at_once_is_refused_in_a_sentence() -> None:
    model = mixture("qwen3_moe")
    experts = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts")
    anything: Any = experts

    def summed(*_: Any) -> None:
        torch.sum(anything.gate_up_proj)

    experts.register_forward_pre_hook(summed)
    with streamed(model), pytest.raises(ConflictError, match="experts_implementation='grouped_mm'"):
        model(**tiny_batch(0))


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_parameters_end_where_they_were(experts: str, tmp_path: Path) -> None:
    model = mixture("gpt_oss", experts)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    anything: Any = model
    with streamed(model):
        model(**tiny_batch(0)).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert parameter.is_contiguous()
            assert torch.equal(parameter, before[name][1])
        anything.base_model.model.save_pretrained(tmp_path)
        # A change of one expert on the host is seen.
        loss = model(**tiny_batch(0)).loss
        weight = next(
            p for n, p in model.named_parameters() if n.endswith("1.mlp.experts.down_proj")
        )
        weight.data[-1] *= 3
        assert not torch.equal(model(**tiny_batch(0)).loss, loss)
        weight.data[-1] /= 3
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.allclose(parameter, before[name][1])


@in_groups
def test_experts_with_adapters_of_their_own_stay() -> None:
    options = {"target_parameters": ["mlp.experts.down_proj"], "lora_dropout": 0.0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **{**_COMMON, **MIXTURES["qwen3_moe"]})
    model = with_adapters(AutoModelForCausalLM.from_config(config), **ATTENTION, **options)
    check(model, "adapters on experts")


def test_small_layers_are_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "largest_block_bytes", streamable.largest_block_bytes)
    with streamed(mixture("mixtral")) as offloader:
        assert offloader.weights is not None
        assert len(offloader.weights.blocks) == 3
        assert "groups" not in offloader.describe()


@pytest.mark.parametrize("num_experts", [1, 2, 7, 128])
@pytest.mark.parametrize("limit_bytes", [1, 100, 4096, 10**9])
@pytest.mark.parametrize("are_read_together", [True, False])
def test_groups_are_of_at_most_the_limit_or_of_one_expert(
    num_experts: int, limit_bytes: int, are_read_together: bool
) -> None:
    experts = FusedExperts(
        names=("a", "b"),
        biases=(),
        num_experts=num_experts,
        nbytes=(64 * num_experts, 32 * num_experts),
        are_read_together=are_read_together,
    )
    groups = experts.groups(limit_bytes, "layer")
    assert [each.names for each in groups] == (
        [("layer.a", "layer.b")] if are_read_together else [("layer.a",), ("layer.b",)]
    )
    each_bytes = [96] if are_read_together else [64, 32]
    for group, nbytes in zip(groups, each_bytes, strict=True):
        assert 1 <= group.group_size <= num_experts
        assert group.group_size == 1 or group.group_size * nbytes <= limit_bytes
