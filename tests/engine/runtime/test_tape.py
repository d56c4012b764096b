"""Micro-batches: when a tape opens and closes, which layers are kept, what is published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import Offloader, attach
from tests.helpers import EVERY_LAYER, EVERYTHING, RecordingTransport, Stack, linear_relu

X = torch.linspace(-1, 1, 16).view(4, 4)


def four_layers() -> Stack:
    return Stack(*[linear_relu] * 4)


def layers_that_moved(transport: RecordingTransport) -> list[str]:
    """Return the numbers of the layers that something was moved of, in order, and forget them."""
    moved = dict.fromkeys(str(label).split(" ")[0] for label, _ in transport.sources)
    transport.sources.clear()
    return [fqn.removeprefix("layers.") for fqn in moved]


@pytest.mark.parametrize(
    ("keep_last_layers", "moved"),
    [(0, "0123"), (1, "012"), (2, "01"), (4, ""), (9, "")],
)
def test_the_last_layers_are_kept(keep_last_layers: int, moved: str) -> None:
    model, transport = four_layers(), RecordingTransport()
    config = replace(EVERYTHING, keep_last_layers=keep_last_layers)
    with attach(model, config, transport=transport) as offloader:
        model(X).sum().backward()
        assert layers_that_moved(transport) == list(moved)
        kept = offloader.metrics().get("kept_bytes/last layer", 0)
        assert (kept > 0) == (keep_last_layers > 0)


def test_every_forward_of_a_micro_batch_keeps_its_own_last_layer() -> None:
    model, transport = four_layers(), RecordingTransport()
    with attach(model, EVERYTHING, transport=transport):
        first = model(X).sum()
        assert layers_that_moved(transport) == ["0", "1", "2"]
        second = model(X).sum()
        assert layers_that_moved(transport) == ["0", "1", "2"]
        (first + second).backward()


def test_of_a_layer_that_runs_several_times_the_last_time_is_kept() -> None:
    model, transport = four_layers(), RecordingTransport()
    shared = model.layers[0]
    model.layers = nn.ModuleList([shared] * 3)
    with attach(model, EVERYTHING, transport=transport) as offloader:
        for _ in range(3):
            model(X).sum().backward()
            offloaded = offloader.metrics()["offloaded_bytes"]
            kept = offloader.metrics()["kept_bytes/last layer"]
        # How often it runs is known from the second forward on: two results and X moved, one stays.
        assert offloaded == 3 * 64
        assert kept == 64


def test_a_layer_that_was_skipped_is_not_waited_for() -> None:
    class Skips(Stack):
        skipped: frozenset[int] = frozenset()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = x if index in self.skipped else layer(x)
            return x

    model, transport = Skips(*[linear_relu] * 4), RecordingTransport()
    with attach(model, EVERYTHING, transport=transport) as offloader:
        for skipped, moved in (({3}, "012"), ({0, 2}, "1"), (set(), "012"), ({1, 2, 3}, "0")):
            model.skipped = frozenset(skipped)
            model(X).sum().backward()
            assert layers_that_moved(transport) == list(moved)
            assert offloader.host_pool.settle() == 0


def micro_batches(offloader: Offloader) -> float:
    return offloader.totals().get("num_micro_batches", 0)


def test_a_micro_batch_is_published_once_its_graph_is_gone() -> None:
    model = four_layers()
    with attach(model, EVERY_LAYER) as offloader:
        for expected in (1, 2, 3):
            model(X).sum().backward()
            assert micro_batches(offloader) == expected

        first, second = model(X.clone()).sum(), model(X.clone()).sum()
        first.backward()
        assert micro_batches(offloader) == 4, "each backward is the end of one"
        second.backward()
        assert micro_batches(offloader) == 5
        single = offloader.metrics()["offloaded_bytes"]

        first, second = model(X.clone()).sum(), model(X.clone()).sum()
        (first + second).backward()
        assert micro_batches(offloader) == 6, "two forwards, and one backward"
        assert offloader.metrics()["offloaded_bytes"] == 2 * single

        loss = model(X).sum()
        loss.backward(retain_graph=True)
        assert micro_batches(offloader) == 6
        loss.backward()
        assert micro_batches(offloader) == 7
        metrics = offloader.metrics()
        assert metrics["offloaded_bytes"] == single
        assert metrics["reloaded_bytes"] == 2 * metrics["offloaded_bytes"], "each backward reloads"


def test_what_was_never_run_backward_is_not_published() -> None:
    model = four_layers()
    with attach(model, EVERY_LAYER) as offloader:
        for _ in range(3):
            model(X)
        assert micro_batches(offloader) == 0
        model(X).sum().backward()
        assert micro_batches(offloader) == 1
        single = offloader.metrics()["offloaded_bytes"]
        partly = model(X)
        torch.autograd.grad(partly.sum(), model.layers[3].weight)
        del partly
        model(X).sum().backward()
        assert micro_batches(offloader) == 3
        assert offloader.metrics()["offloaded_bytes"] == single


def test_a_forward_after_a_backward_is_the_next_micro_batch() -> None:
    model = four_layers()
    with attach(model, EVERY_LAYER) as offloader:
        kept = model(X).sum()
        kept.backward(retain_graph=True)
        model(X).sum().backward()
        assert micro_batches(offloader) == 2
        reloaded = offloader.metrics()["reloaded_bytes"]
        kept.backward()  # of a closed one: right, and counted no more
        assert offloader.metrics()["reloaded_bytes"] == reloaded
        assert micro_batches(offloader) == 2
        del kept
        assert offloader.host_pool.settle() == 0


def test_layers_called_without_their_model() -> None:
    # No one says that a forward begins: the order of the layers does.
    model = four_layers()
    transport = RecordingTransport()
    with attach(model, EVERYTHING, transport=transport) as offloader:
        for expected in (1, 2):
            x = X
            for layer in model.layers:
                x = layer(x)
            x.sum().backward()
            assert layers_that_moved(transport) == ["0", "1", "2"]
            assert micro_batches(offloader) == expected


def test_two_tensors_at_one_address_within_a_layer() -> None:
    values: list[torch.Tensor] = []

    def function(layer: Any, x: torch.Tensor) -> torch.Tensor:
        total = x @ layer.weight
        for index in range(8):
            factor = torch.full((64, 64), float(index))  # freed, and its address used again
            values.append(factor[0, 0].clone())
            total = total + (layer.weight * factor[:4, :4]).sum()
            total = total + (layer.weight * factor.sin()[:4, :4]).sum()
        return total

    plain, model = Stack(function), Stack(function)
    plain(X).sum().backward()
    with attach(model, EVERY_LAYER):
        model(X).sum().backward()
    assert torch.equal(model.layers[0].weight.grad, plain.layers[0].weight.grad)
