"""Steps of models with quantised weights, recorded on fake tensors and compared with what runs."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.quantised_copies import tensors_beside
from hf_pyao.plan.predict.predict import predict
from tests.auto.recording.test_model_copy import program_of
from tests.helpers import gradients_of
from tests.helpers.quantised import KINDS, quantise_
from tests.helpers.simulation.late_transport import LateTransport
from tests.helpers.storages import LiveStorages
from tests.plan.predict.test_referee import storages_alone

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the kernels that are recorded")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is depre:FutureWarning")
MIN_BYTES = 256
WINDOW = 2**14


def quantised(kind: str, family: str = "llama", num_layers: int = 4) -> nn.Module:
    """Return a tiny model with adapters on quantised weights; the same for the same arguments."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 130, "hidden_size": 64, "num_hidden_layers": num_layers}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    model: nn.Module
    if family == "opt":
        model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=128, word_embed_proj_dim=64, dropout=0.0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128))
    if kind:
        quantise_(model, kind)
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 130, (2, 24), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def step(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(**batch(seed), use_cache=False).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_nothing(kind: str) -> None:
    model = quantised(kind)
    step(model)
    model.zero_grad()
    before = {name: (id(p), type(p), p.clone()) for name, p in model.named_parameters()}
    scales = [each.clone() for _, each in tensors_beside(model)]
    program_of(model, batch())
    assert scales
    assert all(map(torch.equal, scales, (each for _, each in tensors_beside(model))))
    for name, parameter in model.named_parameters():
        number, cls, value = before[name]
        assert (id(parameter), type(parameter)) == (number, cls)
        assert torch.equal(parameter, value)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["off", "all"])
def test_a_predicted_peak_is_the_counted_one(kind: str, policy: str) -> None:
    """Counted by a ledger of storages; what a kernel allocates inside is seen by neither."""
    model = quantised(kind)
    step(model)  # int8 moves its weight on the first call
    model.zero_grad()
    program = storages_alone(program_of(model, batch()))
    leaves = [
        policy == "all" and slot.nbytes >= MIN_BYTES and slot.layer < program.num_layers - 1
        for slot in program.slots
    ]
    predicted = predict(program, leaves, window_bytes=WINDOW)
    settings = PyAOConfig.from_dict(
        {"policy": policy, "window": WINDOW, "min_bytes": MIN_BYTES, "keep_last_layers": 1}
    )
    gc.collect()
    gc.disable()
    try:
        with attach(model, settings, transport=LateTransport()) as offloader:
            ledger = LiveStorages(offloader.host_pool.owns)
            ledger.note([*model.parameters(), *model.buffers()])
            ledger.note(each for _, each in tensors_beside(model))
            given = batch()
            ledger.note(given.values())
            with ledger:
                ledger.restart()
                outputs = model(**given, use_cache=False)
                outputs.loss.sum().backward()
            peak_bytes = ledger.peak_bytes
            assert offloader.metrics()["would_hold_bytes"] == sum(s.nbytes for s in program.slots)
    finally:
        gc.enable()
    assert predicted.peak_bytes == peak_bytes


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_auto_plans_within_a_limit(kind: str, family: str, tmp_path: Path) -> None:
    """The plan acts, and gradients keep the bits of the run without hf_pyao."""
    model, reference = quantised(kind, family), quantised(kind, family)
    program = program_of(copy.deepcopy(reference) if kind == "int8" else reference, batch())
    most = predict(program, [False] * len(program.slots), window_bytes=None).peak_bytes
    least = predict(program, [True] * len(program.slots), window_bytes=0).peak_bytes
    limit_gib = (least + 0.6 * (most - least)) / 2**30
    settings = PyAOConfig(
        device_memory_gib=limit_gib, profile_steps=1, min_bytes=MIN_BYTES, window=WINDOW
    )
    model.zero_grad()
    reference.zero_grad()
    with attach(model, settings) as offloader:
        for seed in range(5):
            assert torch.equal(step(model, seed), step(reference, seed))
        found = offloader.metrics()
        plan = offloader.plan
    assert plan is not None
    assert found["offloaded_bytes"] + found["recomputed_bytes"] > 0
    expected = gradients_of(reference)
    assert gradients_of(model).keys() == expected.keys()
    assert all(torch.equal(each, expected[n]) for n, each in gradients_of(model).items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_base_of_torchao_is_recorded(kind: str) -> None:
    """What it saves, and that a plan acts with the bits of the run without hf_pyao."""
    quantization = pytest.importorskip("torchao.quantization")

    def build() -> nn.Module:
        model = quantised("")
        settings = getattr(quantization, kind)()
        quantization.quantize_(model, settings, lambda _, name: name.endswith("base_layer"))
        return model

    model, reference = build(), build()
    program = program_of(model, batch())
    limited = PyAOConfig(device_memory_gib=1e-6, profile_steps=1, min_bytes=0, checkpoint_every=0)
    everything = {"policy": "all", "min_bytes": 0, "keep_last_layers": 0, "window": 0}
    with attach(model, PyAOConfig(**everything)) as offloader:
        assert torch.equal(step(model), step(reference))
        held_bytes = offloader.metrics()["would_hold_bytes"]
    assert held_bytes == sum(slot.nbytes for slot in program.slots)
    with attach(model, limited) as offloader:
        for seed in range(4):
            assert torch.equal(step(model, seed), step(reference, seed))
        assert offloader.plan is not None
        found = offloader.metrics()
    assert found["offloaded_bytes"] + found["recomputed_bytes"] > 0
    expected = gradients_of(reference)
    assert all(torch.equal(each, expected[n]) for n, each in gradients_of(model).items())


def test_weights_of_a_subclass_with_attributes() -> None:
    """A stand-in has the attributes, and what they share with the model is shared in the copy."""

    class Scaled(nn.Parameter):
        """A parameter with a scale beside it, as quantised weights have."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight: Any = Scaled(torch.randn(8, 8), requires_grad=False)
            weight.scale = self.scale = torch.rand(8)
            self.weight = weight

    layer = Layer()
    (found,) = [each for _, each in tensors_beside(nn.Sequential(layer))]
    assert found is layer.scale
