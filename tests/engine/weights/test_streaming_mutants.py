"""Faults of streaming that a test must see: casts that last, a failed upload, broken ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install.weight_memory import WeightMemory
from hf_pyao.engine.transfer.ring_schedule import RingSchedule
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.model.weights import streamable
from tests.engine.weights.test_streaming import llama, loss_of, streamed
from tests.helpers import FunctionLayer, Stack, gradients_of


def same_gradients(model: nn.Module, reference: nn.Module) -> bool:
    found, expected = gradients_of(model), gradients_of(reference)
    return all(torch.equal(found[name], value) for name, value in expected.items())


# ---- a cast that is not made anew ----------------------------------------------------------------


# ---- a block that an exception kept from coming --------------------------------------------------


class Failing(BlockingTransport):
    """Raises once, in place of the upload with a number; the slot holds what it held before."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self._left, self._error = at, error

    def reload(self, *args: Any, **options: Any) -> Any:
        if "weights of" in str(options["label"]):
            self._left -= 1
            if self._left == -1:
                raise self._error
        return super().reload(*args, **options)


def survives_failed_uploads(numbers: range, error: type[BaseException]) -> bool:
    """Say whether the step after a failed one is right, wherever in its uploads that failed."""
    plain = llama()
    loss_of(plain).backward()
    for at in numbers:
        model = llama()
        config = PyAOConfig(policy="off", host_memory_gib=0.1, stream_weights=0)
        with attach(model, config, transport=Failing(at, error)):
            with pytest.raises(error):
                for _ in range(3):
                    loss_of(model).backward()
            model.zero_grad()
            loss_of(model).backward()
            if not same_gradients(model, plain):
                return False
    return True


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_upload_that_failed_the_next_step_is_right(error: type[BaseException]) -> None:
    assert survives_failed_uploads(range(0, 14, 3), error)


@pytest.mark.thorough
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_any_upload_that_failed_the_next_step_is_right(error: type[BaseException]) -> None:
    assert survives_failed_uploads(range(14), error)


def test_mutant_that_takes_the_wrong_block_after_an_exception_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(ring: RingSchedule, block: int, slot: int) -> None:
        ring.slots[slot] = block  # before it is there
        ring.upload(block, slot)
        ring.num_uploads += 1

    monkeypatch.setattr(RingSchedule, "_put", put)
    assert not survives_failed_uploads(range(2, 10), RuntimeError)


# ---- weights that share their bytes --------------------------------------------------------------


def product(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ layer.weight) * layer.scale + x


def tied_stack() -> Stack:
    """Four layers: the weights of 1 and 3 are two parameters over the same bytes."""
    stack = Stack(*[product] * 4)
    stack.requires_grad_(False)
    layers: Any = stack.layers
    layers[3].weight = nn.Parameter(layers[1].weight.detach(), requires_grad=False)
    for layer in layers:
        layer.scale = nn.Parameter(torch.rand(4, generator=torch.Generator().manual_seed(0)))
    return stack


def ties_hold(first: int, second: int) -> bool:
    """Say whether what is written to one of the two is read through the other, and trained with."""
    model, plain = tied_stack(), tied_stack()
    x = torch.ones(2, 4)
    with streamed(model):
        model(x).sum().backward()
        for each in (model, plain):
            layers: Any = each.layers
            with torch.no_grad():
                layers[first].weight.mul_(3)
            each.zero_grad()
            each(x).sum().backward()
        layers = model.layers
        is_seen = torch.equal(layers[first].weight, layers[second].weight)
        return is_seen and same_gradients(model, plain)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_what_is_written_to_one_of_two_tied_weights_is_read_through_the_other(
    first: int, second: int
) -> None:
    assert ties_hold(first, second)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_mutant_that_streams_tied_weights_apart_is_caught(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamable, "is_tied", lambda *_: False)
    # Tied weights that stay where they lie stay tied.
    monkeypatch.setattr(WeightMemory, "_leave_in_place", lambda *_: False)
    assert not ties_hold(first, second)
