"""Bytes: what a layer stores is what its trace predicts, and the allocator's ledger agrees."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.observer import Observer
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.ledger import AllocationLedger
from tests.helpers.recompute_sets import ALONE, CASES, SETS
from tests.helpers.trace_graph import graph_of

MODELS = tuple(SETS)

NUM_SCALARS = {"opt": 1, "gpt2": 3, "llama": 0}
"""Python numbers by which a layer multiplies: autograd saves each as a CPU tensor of 8 bytes, also
where everything else is on an accelerator."""

LENGTH = 16


def traces_of(
    model: nn.Module, config: PyAOConfig, **inputs: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a step; return each layer's trace and the metrics."""
    graphs = {}
    with attach(model, config) as offloader:

        class Notes(Observer):
            def on_trace(self, layer: str, recomputation: Any) -> None:
                graphs[layer] = graph_of(recomputation.trace)

        offloader.engine.observe(Notes())
        model(**tiny_batch(length=LENGTH), **inputs).loss.backward()
        return graphs, offloader.metrics()


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(("model_type", "names"), CASES)
def test_stored_bytes_are_those_that_the_traces_predict(
    model_type: str, names: tuple[str, ...], dropout: float
) -> None:
    model = tiny_model(model_type, dropout=dropout, dtype=torch.bfloat16)
    graphs, metrics = traces_of(model, replace(EVERY_LAYER, recompute_modules=names))
    assert len(graphs) == 3
    predicted = dict.fromkeys(("stored", "recomputed"), 0)
    for graph in graphs.values():
        for value in graph["values"]:
            if value["state"] in predicted:
                predicted[value["state"]] += value["nbytes"]
    assert metrics["offloaded_bytes"] == predicted["stored"]
    assert metrics["recomputed_bytes"] == predicted["recomputed"]


@pytest.mark.parametrize("model_type", MODELS)
def test_pointwise_replays_no_product(model_type: str) -> None:
    graphs, _ = traces_of(tiny_model(model_type), replace(ALONE, recompute_modules=("pointwise",)))
    for graph in graphs.values():
        products = [one for one in graph["operations"] if one["kind"] == "product"]
        assert len(products) >= 5
        for product in products:
            states = {graph["values"][index]["state"] for index in product["outputs"]}
            assert states <= {"stored", "unused"}
        assert any(value["state"] == "recomputed" for value in graph["values"])


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


FINGERPRINT_BYTES = 8
"""What a checked forward keeps of a tensor that it drops; see ``engine/recompute/fingerprints``."""


@pytest.mark.thorough
@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("names", [("pointwise",), ("*",)], ids=["pointwise", "everything"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_middle_layer_leaves_only_fingerprints_on_the_device(
    model_type: str, names: tuple[str, ...], verify: str
) -> None:
    """One more layer adds no byte of a saved tensor, by the allocator's own account."""
    plain = [held_after_forward(model_type, count, None) for count in (3, 4)]
    config = replace(EVERY_LAYER, recompute_modules=names, verify_recompute=verify)
    ours = [held_after_forward(model_type, count, config) for count in (3, 4)]
    assert plain[1] - plain[0] > 2 * LENGTH * 32 * 4 * 5  # so there was something to free
    num_fingerprints = 0
    if verify == "always":
        graphs, _ = traces_of(tiny_model(model_type), config, use_cache=False)
        values = graphs[sorted(graphs)[1]]["values"]
        num_fingerprints = sum(value["state"] == "recomputed" for value in values)
        assert num_fingerprints > 0
    assert ours[1] - ours[0] == 8 * NUM_SCALARS[model_type] + FINGERPRINT_BYTES * num_fingerprints


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
