"""A lossy codec gets what a layer computed, and nothing of which a small error is a large one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_pyao import attach
from hf_pyao.engine.codecs import Encoded
from hf_pyao.engine.codecs.int8 import Int8Codec
from tests.helpers import EVERY_LAYER, NUM_LAYERS, autocasting, tiny_batch, tiny_model
from tests.helpers.simulation.late_transport import LateTransport

BATCH, LENGTH, HIDDEN = 2, 24, 32


class Spy(Int8Codec):
    """Keeps copies of what it encodes."""

    def __init__(self) -> None:
        super().__init__("row")
        self.seen: list[torch.Tensor] = []
        self.num_decoded = 0

    def encode(self, tensor: torch.Tensor) -> Encoded:
        self.seen.append(tensor.clone())
        return super().encode(tensor)

    def decode(self, payload: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        self.num_decoded += 1
        return super().decode(payload, spec)


def step(
    model_type: str, attention: str, autocast: torch.dtype | None
) -> tuple[Spy, dict[str, Any]]:
    # With dropout, a CPU's sdpa has no logsumexp.
    model = tiny_model(model_type, attention=attention, dropout=0.1 if attention == "eager" else 0)
    spy = Spy()
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    batch = tiny_batch(size=BATCH, length=LENGTH)
    with autocasting(autocast), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        torch.manual_seed(0)
        exact = model(**batch, use_cache=False).loss
    del exact
    with attach(model, replace(EVERY_LAYER, codec=spy)) as offloader:
        torch.manual_seed(0)
        with autocasting(autocast):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        return spy, {"metrics": offloader.metrics(), "saved": saved}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama"])
def test_statistics_masks_and_indices_are_not_encoded(
    model_type: str, attention: str, autocast: torch.dtype | None
) -> None:
    spy, found = step(model_type, attention, autocast)
    encoded = {tuple(tensor.shape) for tensor in spy.seen}
    assert all(tensor.dtype.is_floating_point for tensor in spy.seen)
    # Means, deviations and logsumexp have as many values as there are tokens, or tokens and heads.
    statistics = [
        tensor
        for tensor in found["saved"]
        if tensor.dtype == torch.float32
        and tensor.numel() in (BATCH * LENGTH, BATCH * LENGTH * 4)
        and tensor.numel() < BATCH * LENGTH * HIDDEN
    ]
    assert len(statistics) >= NUM_LAYERS * 2  # so there was something to spare
    for tensor in statistics:  # the codec sees a storage, in whatever order it lies
        values = tensor.flatten().sort().values
        assert not any(
            other.numel() == values.numel() and torch.equal(other.flatten().sort().values, values)
            for other in spy.seen
        ), tuple(tensor.shape)
    assert len(spy.seen) > NUM_LAYERS * 5
    assert any(shape[-1] == HIDDEN for shape in encoded)
    assert found["metrics"]["link_bytes"] < 0.6 * 2 * found["metrics"]["offloaded_bytes"]


@pytest.mark.parametrize("window", [0, 2**30])
def test_what_several_nodes_saved_is_decoded_once(window: int) -> None:
    """In OPT the activation's result and the next product's input. With a large window nothing has
    left when backward asks for it."""
    model, spy = tiny_model("opt", dropout=0), Spy()
    config = replace(EVERY_LAYER, codec=spy, window=window, recompute_modules=())
    with attach(model, config, transport=LateTransport()) as offloader:
        model(**tiny_batch(size=BATCH, length=LENGTH), use_cache=False).loss.backward()
        assert (offloader.metrics()["reloaded_bytes"] > 0) == (window == 0)
    assert spy.num_decoded == len(spy.seen) > 0
