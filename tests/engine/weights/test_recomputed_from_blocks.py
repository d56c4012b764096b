"""What backward recomputes from streamed weights: as much as from resident ones, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import SavedTensorModifiedError
from tests.helpers import tiny_batch
from tests.helpers.adapters import tiny_lora

PRODUCTS = ("mlp.gate_proj", "mlp.up_proj")
"""Their results are rebuilt from frozen weights."""
RECOMPUTES: dict[str, Any] = {"policy": "all", "min_bytes": 0, "recompute_modules": PRODUCTS}


def gradients(**settings: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Return a step's gradients, and the bytes that it recomputed."""
    model = tiny_lora("llama").train()
    with attach(model, PyAOConfig(**RECOMPUTES, host_memory_gib=0.1, **settings)) as offloader:
        model(**tiny_batch(), use_cache=False).loss.backward()
        recomputed = offloader.metrics()["recomputed_bytes"]
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, recomputed


def test_as_much_is_recomputed_from_streamed_weights_as_from_resident_ones() -> None:
    expected, of_resident = gradients()
    found, of_streamed = gradients(stream_weights=0)
    assert of_streamed == of_resident > 0
    assert expected.keys() == found.keys() != set()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_streamed_weight_that_changed_before_it_is_read_again_is_an_error() -> None:
    model = tiny_lora("llama").train()
    config = PyAOConfig(**RECOMPUTES, host_memory_gib=0.1, stream_weights=0)
    with attach(model, config):
        loss = model(**tiny_batch(), use_cache=False).loss
        name = "layers.0.mlp.gate_proj.base_layer.weight"
        weight = next(p for n, p in model.named_parameters() if n.endswith(name))
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(SavedTensorModifiedError, match="between forward and backward"):
            loss.backward()
