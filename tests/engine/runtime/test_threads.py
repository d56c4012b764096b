"""Several threads: autograd's, one for each device, and those that train one model at once."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.codecs.narrow import NarrowCodec
from hf_pyao.engine.runtime.run_figures import RunFigures
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket, LinkTimes
from hf_pyao.metrics import MicroBatchStats
from tests.helpers import (
    EVERY_LAYER,
    Stack,
    assert_same_tensors,
    gradients_of,
    linear_relu,
    tiny_batch,
    tiny_model,
)


class SlowReloads(BlockingTransport):
    """Lets other threads in between the start of a copy back and its end."""

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> DoneTicket:
        dst.fill_(0xFF)
        time.sleep(0.05)
        return super().reload(src, dst, **options)


def test_two_threads_may_unpack_one_storage_at_once() -> None:
    model = Stack(linear_relu, linear_relu)
    with attach(model, EVERY_LAYER, transport=SlowReloads()):
        output = model(torch.randn(4, 4))
        node, expected = output.grad_fn, output.detach().clone()
        seen: list[torch.Tensor] = []
        errors: list[BaseException] = []
        barrier = threading.Barrier(4)

        def look() -> None:
            barrier.wait()
            try:
                seen.append(node._saved_result)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(seen) == 4
        assert all(torch.equal(tensor, expected) for tensor in seen)
        output.sum().backward()


# ---- one model in several threads
# -----------------------------------------------------------------


NUM_THREADS = 3
EVERYTHING_AGAIN = ("pointwise", "*")

CASES: dict[str, PyAOConfig] = {
    "layer": EVERY_LAYER,
    "bytes": replace(EVERY_LAYER, window=2048),
    "nothing ahead": replace(EVERY_LAYER, window=0),
    "narrow": replace(EVERY_LAYER, codec=NarrowCodec()),
    "bitmask": replace(EVERY_LAYER, codec="bitmask"),
    "pointwise": replace(EVERY_LAYER, recompute_modules=("pointwise",)),
    "all": replace(EVERY_LAYER, recompute_modules=EVERYTHING_AGAIN, window=2048),
}


@contextmanager
def switching_often() -> Iterator[None]:
    """Let Python switch between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def gradients_at(model: Any, seed: int) -> torch.Tensor:
    loss = model(**tiny_batch(seed), use_cache=False).loss
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def train_in_threads(config: PyAOConfig, num_steps: int) -> None:
    """Run steps of one model in several threads; compare each with plain torch."""
    model = tiny_model("llama", num_hidden_layers=2)
    seeds = [range(thread, thread + num_steps) for thread in range(NUM_THREADS)]
    expected = {seed: gradients_at(model, seed) for seed in range(num_steps + NUM_THREADS)}
    failures: list[BaseException] = []

    def work(seeds: range) -> None:
        try:
            for seed in seeds:
                assert torch.equal(gradients_at(model, seed), expected[seed])
        except BaseException as error:
            failures.append(error)

    with attach(model, config) as offloader, switching_often():
        threads = [threading.Thread(target=work, args=(part,)) for part in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert offloader.engine.num_layer_calls > 0
        assert offloader.totals()["offloaded_bytes"] > 0
        assert offloader.host_pool.settle() == 0


@pytest.mark.parametrize("name", ["bytes", "all"])
def test_one_model_in_several_threads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        train_in_threads(CASES[name], num_steps=4)
    assert not caplog.records, "none of these steps was idle"


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_many_steps_of_one_model_in_several_threads(name: str) -> None:
    for _ in range(4):
        train_in_threads(CASES[name], num_steps=8)


def test_a_forward_on_another_thread_ends_nothing_of_ours() -> None:
    """Between the layers of one forward, and within its backward, another thread does a step."""

    def elsewhere(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: other.append(gradients_at(model, 1)))
            thread.start()
            thread.join()

    model = tiny_model("llama")
    expected = gradients_at(model, 0), gradients_at(model, 1)
    other: list[torch.Tensor] = []
    with attach(model, CASES["all"]) as offloader:
        model.model.layers[1].register_forward_pre_hook(elsewhere)
        model.model.layers[1].mlp.register_full_backward_hook(elsewhere)
        loss = model(**tiny_batch(0), use_cache=False).loss
        tape = offloader.engine._here.tape
        assert tape is not None
        assert len(tape.calls) == 3, "all layer calls are of one micro-batch"
        parts = torch.autograd.grad(loss, list(model.parameters()))
    assert torch.equal(torch.cat([part.flatten() for part in parts]), expected[0])
    assert len(other) == 2
    assert all(torch.equal(found, expected[1]) for found in other)


# ---- backward inside of a layer, and recomputation
# ------------------------------------------------


def test_a_backward_inside_of_a_layer_that_is_recomputed() -> None:
    """What is dropped after it began was not known when it counted who reads what."""

    def function(layer: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ layer.weight).tanh().exp()
        (inner,) = torch.autograd.grad(hidden.sum(), layer.weight, retain_graph=True)
        return (hidden.sigmoid() * inner).exp() * hidden.exp().sigmoid()

    model, x = Stack(function, function), torch.linspace(-1, 1, 16).view(4, 4)
    model(x).sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    with attach(model, CASES["all"]) as offloader:
        model(x).sum().backward()
        assert_same_tensors(gradients_of(model), expected, "attached")
        assert offloader.metrics()["recomputed_bytes"] > 0


class OtherThreadCounts:
    """A mover, in whose look at the times of copies another thread counts a micro-batch."""

    def __init__(self) -> None:
        self.other: threading.Thread | None = None
        self.figures = RunFigures(self)  # type: ignore[arg-type]

    def collect(self, stats: MicroBatchStats) -> LinkTimes:
        return LinkTimes()

    def collect_times(self, stats: MicroBatchStats, times: LinkTimes) -> None:
        stats.transfer_ms += 1.0
        if self.other is None:
            self.other = threading.Thread(target=self.figures.count, args=(MicroBatchStats(),))
            self.other.start()
            self.other.join(timeout=0.2)  # it waits until this thread has counted


def test_threads_that_count_micro_batches_at_once() -> None:
    mover = OtherThreadCounts()
    mover.figures.count(MicroBatchStats())
    mover.figures.settle_times()
    assert mover.other is not None
    mover.other.join()
    totals = mover.figures.totals
    assert totals.num_micro_batches == 2
    assert totals.as_dict()["transfer_ms"] == 2.0
