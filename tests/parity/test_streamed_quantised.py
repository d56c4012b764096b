"""Streaming a quantised base equals training over the same base on the device, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from tests.helpers import ACCUMULATING, assert_same_trajectory, tiny_model, train
from tests.helpers.adapters import with_adapters
from tests.helpers.quantised import KINDS, quantise_

pytest.importorskip("bitsandbytes")


def quantised_lora(kind: str, model_type: str = "llama", **adapters: Any) -> Any:
    model = tiny_model(model_type, num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    return with_adapters(quantise_(model, kind), lora_dropout=0.1, **adapters)


def check(model: Any, what: str, autocast: Any = None, **settings: Any) -> Any:
    expected_model = copy.deepcopy(model)
    ours = copy.deepcopy(model)
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
    check(quantised_lora(kind), kind, min_bytes=0)


@pytest.mark.sampled(every=3)
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
    check(quantised_lora(kind), f"{kind}, {settings}", autocast, **settings)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", ["nested nf4", "int8"])
def test_dora_reads_quantised_weights(kind: str) -> None:
    check(quantised_lora(kind, use_dora=True), f"DoRA, {kind}", min_bytes=0)


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
