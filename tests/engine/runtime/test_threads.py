"""Several threads: autograd's, one for each device, and those that train one model at once."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.codecs.narrow import NarrowCodec
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket
from tests.helpers import (
    EVERY_LAYER,
    Stack,
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
def test_one_model_in_several_threads(name: str) -> None:
    train_in_threads(CASES[name], num_steps=4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_many_steps_of_one_model_in_several_threads(name: str) -> None:
    for _ in range(4):
        train_in_threads(CASES[name], num_steps=8)


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what *work* returns on a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="second")
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("settings", [{}, {"checkpoint_every": 1}])
def test_a_second_thread_is_passed_over(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread does a step between two layers of a forward, before its backward, and in it;
    not after it."""

    def elsewhere(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            num_calls = offloader.engine.num_layer_calls
            other.append(in_thread(lambda: gradients_at(model, 1)))
            num_served.append(offloader.engine.num_layer_calls - num_calls)

    model = tiny_model("llama")
    expected = gradients_at(model, 0), gradients_at(model, 1)
    other: list[torch.Tensor] = []
    num_served: list[int] = []
    config = replace(CASES["all"], recompute_modules=(), **settings)
    with attach(model, config) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        model.model.layers[1].register_forward_pre_hook(elsewhere)
        model.model.norm.register_full_backward_hook(elsewhere)
        for _ in range(2):
            loss = model(**tiny_batch(0), use_cache=False).loss
            tape = offloader.engine._tape
            assert tape is not None and len(tape.calls) == 3, "all layer calls are of one forward"
            elsewhere()
            parts = torch.autograd.grad(loss, list(model.parameters()))
            assert torch.equal(torch.cat([part.flatten() for part in parts]), expected[0])
        del loss, parts, tape
        assert len(num_served) >= 6 and not any(num_served)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "thread 'second' enters the model" in said and "[pyao:second-thread]" in said
        elsewhere()
        assert num_served[-1] == 3
    assert all(torch.equal(found, expected[1]) for found in other)


def test_threads_that_train_one_after_the_other_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second is the first again, and the third fails within a layer, on a thread that ends."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def step() -> torch.Tensor | None:
        try:
            return gradients_at(model, 2)
        except KeyboardInterrupt:
            return None

    model = tiny_model("gpt2")
    expected = gradients_at(model, 2)
    with attach(model, CASES["bytes"]) as offloader, caplog.at_level(logging.WARNING, "hf_pyao"):
        for work in (step, lambda: in_thread(step), step):
            num_calls = offloader.engine.num_layer_calls
            assert torch.equal(work(), expected)
            assert offloader.engine.num_layer_calls > num_calls
        handle = model.transformer.h[1].mlp.register_forward_pre_hook(fail)
        assert in_thread(step) is None
        handle.remove()
        num_calls = offloader.engine.num_layer_calls
        assert torch.equal(step(), expected)
        assert offloader.engine.num_layer_calls > num_calls
    assert not [record for record in caplog.records if "second-thread" in record.getMessage()]
