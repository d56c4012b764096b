"""Bytes: what a layer stores is what was counted by hand, and the allocator's ledger agrees."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.ledger import AllocationLedger
from tests.helpers.recompute_sets import ALONE, SETS

MODELS = tuple(SETS)

NUM_SCALARS = {"opt": 1, "gpt2": 3, "llama": 0}
"""Python numbers by which a layer multiplies: autograd saves each as a CPU tensor of 8 bytes, also
where everything else is on an accelerator."""

LENGTH = 16


def saved_by_hand(model_type: str) -> int:
    """Return the bytes that a layer must store if no product runs again, counted on paper.

    Per token of 16-bit numbers: both norms' inputs (for LayerNorm they are saved as they are; for
    Llama only the 16-bit residuals, from which the fp32 copies follow), q, k, v, attention's
    output, and what the up-projections give (OPT: relu of it). CPU attention also saves a
    logsumexp in fp32 per head and token, and on a CPU GPT-2's attention saves a copy of q too,
    before the product that q, k and v are views of.
    """
    hidden, inner, heads = 32, 128 if model_type == "gpt2" else 64, 4
    keys = hidden // 2 if model_type == "llama" else hidden
    up = 2 * inner if model_type == "llama" else inner
    queries = 2 * hidden if model_type == "gpt2" else hidden
    per_token = 2 * (2 * hidden + queries + 2 * keys + hidden + up) + 4 * heads
    return 2 * LENGTH * per_token


@pytest.mark.parametrize("model_type", MODELS)
def test_pointwise_stores_what_was_counted_by_hand(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.bfloat16)
    config = replace(EVERY_LAYER, recompute_modules=("pointwise",))
    with attach(model, config) as offloader:
        model(**tiny_batch(length=LENGTH)).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] == 3 * saved_by_hand(model_type)


def held_after_forward(model_type: str, num_layers: int, config: PyAOConfig | None) -> int:
    """Return the bytes that a forward leaves allocated, the host's among them."""
    name = "n_layer" if model_type == "gpt2" else "num_hidden_layers"
    model = tiny_model(model_type, **{name: num_layers})
    offloader = attach(model, config) if config else None
    batch = tiny_batch(length=LENGTH)
    model(**batch, use_cache=False).loss.backward()  # the host pool grows to its size
    model.zero_grad()
    gc.collect()  # older releases of transformers leave cycles behind
    with AllocationLedger() as ledger:
        loss = model(**batch, use_cache=False).loss
        gc.collect()
    if offloader is not None:
        loss.backward()
        offloader.detach()
    return ledger.live_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("pointwise",), ("*",)], ids=["pointwise", "everything"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_middle_layer_leaves_nothing_on_the_device(
    model_type: str, names: tuple[str, ...]
) -> None:
    """One more layer adds no byte of a saved tensor, by the allocator's own account."""
    plain = [held_after_forward(model_type, count, None) for count in (3, 4)]
    config = replace(EVERY_LAYER, recompute_modules=names, verify_recompute="off")
    ours = [held_after_forward(model_type, count, config) for count in (3, 4)]
    assert plain[1] - plain[0] > 2 * LENGTH * 32 * 4 * 5  # so there was something to free
    assert ours[1] - ours[0] == 8 * NUM_SCALARS[model_type]


def peak_of_backward(model: nn.Module, *, retain_graph: bool) -> int:
    """Return the most bytes that backward allocates beyond what is there when it begins."""
    batch = tiny_batch(length=64)
    model(**batch, use_cache=False).loss.backward()  # gradients are there from now on
    loss = model(**batch, use_cache=False).loss
    gc.collect()  # what transformers leaves in cycles is freed in no backward
    with AllocationLedger() as ledger:
        loss.backward(retain_graph=retain_graph)
    return ledger.peak_bytes


@pytest.mark.parametrize("retain_graph", [False, True], ids=["freed", "retained"])
@pytest.mark.parametrize("names", [("pointwise",), ("*",)], ids=["pointwise", "everything"])
@pytest.mark.parametrize("model_type", MODELS)
def test_the_peak_of_replay_is_one_layers_dropped_bytes(
    model_type: str, names: tuple[str, ...], retain_graph: bool
) -> None:
    transient = peak_of_backward(tiny_model(model_type), retain_graph=True)
    model = tiny_model(model_type)
    # A check of what is rebuilt, as in the first steps, takes a copy of one tensor besides.
    config = replace(ALONE, recompute_modules=names, verify_recompute="off")
    with attach(model, config) as offloader:
        peak = peak_of_backward(model, retain_graph=retain_graph)
        dropped = offloader.metrics()["recomputed_bytes"] / 3
    assert dropped > 0
    assert peak <= transient + dropped
