"""Streaming a quantised base equals training over the same base on the device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from tests.helpers import (
    ACCUMULATING,
    assert_same_tensors,
    assert_same_trajectory,
    gradients_of,
    tiny_model,
    train,
)
from tests.helpers.adapters import with_adapters
from tests.helpers.quantised import KINDS, quantise_

pytest.importorskip("bitsandbytes")


def quantised_lora(kind: str, model_type: str = "llama", **adapters: Any) -> Any:
    model = tiny_model(model_type, num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    return with_adapters(quantise_(model, kind), lora_dropout=0.1, **adapters)


def check(build: Callable[[], Any], what: str, autocast: Any = None, **settings: Any) -> Any:
    """Compare training with streamed weights with a plain run, each of a model of its own.

    Neither is a copy of the other: a copied int8 weight loses its scales.
    """
    expected_model, ours = build(), build()
    for (name, p), q in zip(expected_model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), f"{what}: {name} differs before training"
    expected = train(expected_model, ACCUMULATING, autocast=autocast)
    with attach(
        ours, PyAOConfig(**{"stream_weights": 0, "policy": "all", **settings})
    ) as offloader:
        found = train(ours, ACCUMULATING, autocast=autocast)
        ring = offloader.weights.ring
    assert_same_trajectory(found, expected, what)
    assert ring.num_uploads > 0
    assert ring.counts.num_left == 0, f"{what}: someone held a slot"
    return ring


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind: str) -> None:
    check(lambda: quantised_lora(kind), kind, min_bytes=0)


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_every": 2},
        {"policy": "off"},
        {"stream_weights": 1},
        {"recompute_modules": ("pointwise",)},
    ],
    ids=["segments", "nothing offloaded", "one layer stays", "recomputed"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_under(kind: str, settings: dict[str, Any], autocast: Any) -> None:
    check(lambda: quantised_lora(kind), f"{kind}, {settings}", autocast, **settings)


@pytest.fixture
def dora_leaves_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PEFT's DoRA read int8 weights on a CPU as it does on other devices.

    On a CPU alone it puts a copy of the weight without scales into the module, so that the second
    forward of a plain run fails (PEFT 0.21, bitsandbytes 0.50).
    """
    from peft.tuners.lora import dora
    from peft.utils.integrations import dequantize_bnb_weight

    own = dora.dequantize_module_weight

    def dequantised(module: Any) -> Any:
        if type(module).__name__ != "Linear8bitLt":
            return own(module)
        return dequantize_bnb_weight(module.weight, state=module.state)

    monkeypatch.setattr(dora, "dequantize_module_weight", dequantised)


@pytest.mark.usefixtures("dora_leaves_modules_alone")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["nested nf4", "int8"])
def test_dora_reads_quantised_weights(kind: str) -> None:
    check(lambda: quantised_lora(kind, use_dora=True), f"DoRA, {kind}", min_bytes=0)


@pytest.mark.parametrize("kind", ["nested nf4", "int8"])
def test_the_state_is_that_of_the_model(kind: str) -> None:
    """While it streams, and after it is detached: files of the model are as ever.

    No plain forward in eval mode is made: on some CPUs bitsandbytes packs weights anew for it.
    """
    model = quantised_lora(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}
    with attach(model, PyAOConfig(stream_weights=0, policy="all")):
        model.train()(**batch).loss.backward()
        during = dict(model.state_dict())
    for state in (during, model.state_dict()):
        assert state.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(state[name], value), name


def test_training_after_an_evaluation_has_the_bits_of_training_alone() -> None:
    """On some CPUs bitsandbytes packs weights anew for an evaluation: those of the device alone."""
    model, plain = quantised_lora("nested nf4"), quantised_lora("nested nf4")
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    with attach(model, PyAOConfig(stream_weights=0, policy="all")) as offloader:
        for _ in range(2):
            with torch.no_grad():
                model.eval()(**batch)
        for each in (model, plain):
            torch.manual_seed(8)
            each.train()(**batch).loss.backward()
        assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")
        on_device = offloader.weights.ring.on_device
        assert min(block.num_holders for block in on_device) >= 0
