"""Weights of a copy are there while their module runs, and gradients are gone behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_pyao.auto.recording.gathers import Gathers, Unit
from hf_pyao.plan.step.recording_mode import RecordingMode
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.step_recorder import StepRecorder

WIDTH = 10
NUM_RANKS = 2
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH


def stack(num_layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def run(
    model: nn.Sequential, *, again: bool = False, **settings: Any
) -> tuple[list[tuple[str, list[int]]], StepProgram]:
    """Run a micro-batch of fake tensors.

    Returns:
        Where each layer was, and which layers' weights were there then; and the recorded step.
    """
    seen: list[tuple[str, list[int]]] = []

    def note(number: int, phase: str) -> None:
        there = [n for n, each in enumerate(model) if each.weight.untyped_storage().nbytes()]
        seen.append((f"{phase} {number}", there))

    units = [
        Unit(modules=(each,), parameters=tuple(each.parameters()), num_ranks=NUM_RANKS, **settings)
        for each in model
    ]
    gathers = Gathers(units)
    gathers.install()
    for number, each in enumerate(model):
        each.register_forward_hook(lambda *_, n=number: note(n, "forward"), prepend=True)
        each.bias.register_hook(lambda _, n=number: note(n, "backward"))
    recorder = StepRecorder()
    recorder.begin(["0"], lambda storage: False)
    gathers.tell(recorder.exchanged)
    given = torch.ones(3, WIDTH, requires_grad=True)
    with RecordingMode(recorder):
        result = checkpoint(model, given, use_reentrant=False) if again else model(given)
        result.sum().backward()
        gathers.end_micro_batch()
    return seen, recorder.program(0)


@pytest.fixture
def model() -> Any:
    with FakeTensorMode():
        yield stack()


def test_weights_are_there_for_their_own_layer_alone(model: nn.Sequential) -> None:
    seen, _ = run(model)
    layers = [(phase, n) for phase in ("forward", "backward") for n in range(3)]
    layers[3:] = reversed(layers[3:])
    assert seen == [(f"{phase} {n}", [n]) for phase, n in layers]
    assert not any(each.untyped_storage().nbytes() for each in model.parameters())
    assert all(each.grad is None for each in model.parameters())


def test_what_stays_is_there_until_its_backward(model: nn.Sequential) -> None:
    seen, program = run(model, stays=True)
    assert [there for _, there in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1], [0]]
    assert sum(each.name == "all_gather" for each in program.operations) == 3


def test_a_layer_that_runs_again_gathers_once_more_and_not_twice(model: nn.Sequential) -> None:
    _, program = run(model, again=True)
    assert sum(each.name == "all_gather" for each in program.operations) == 6


@pytest.mark.parametrize("kept", [None, torch.float32])
def test_this_ranks_part_of_gradients_stays(kept: torch.dtype | None, model: nn.Sequential) -> None:
    _, program = run(model, kept_dtype=kept)
    left = [b.nbytes for b in program.buffers if b.death >= program.num_operations]
    parts = sum(nbytes == LAYER_BYTES // NUM_RANKS for nbytes in left)
    assert parts == (0 if kept is None else 3)


def awaited(program: StepProgram) -> list[tuple[str, int]]:
    """Return what waits, and for which collective of the step."""
    found, num_queued = [], 0
    for each in program.operations:
        if each.awaits:
            found.append((each.name, num_queued - each.awaits))
        num_queued += each.collective is not None
    return found


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_gather_is_a_collective_that_compute_waits_for(
    runs_ahead: bool, model: nn.Sequential
) -> None:
    _, program = run(model, runs_ahead=runs_ahead, is_reduced=False)
    found = [each.collective for each in program.operations if each.collective]
    assert [tuple(each) for each in found] == [(LAYER_BYTES // NUM_RANKS, runs_ahead)] * 6
    assert awaited(program) == [("wait", number) for number in range(6)]


@pytest.mark.parametrize("sums_all", [False, True])
@pytest.mark.parametrize("num_beside", [0, 1, 2])
def test_reductions_run_beside_compute_as_far_as_the_engine_lets_them(
    num_beside: int, sums_all: bool
) -> None:
    with FakeTensorMode():
        _, program = run(stack(5), is_gathered=False, num_beside=num_beside, sums_all=sums_all)
    found = [each.collective for each in program.operations if each.collective]
    nbytes = (1 + sums_all) * LAYER_BYTES // NUM_RANKS
    assert [tuple(each) for each in found] == [(nbytes, False)] * 5
    names, numbers = zip(*awaited(program), strict=True)
    assert set(names) == {"reduce_scatter" if num_beside else "wait"}
    assert list(numbers) == list(range(5 - num_beside))
