"""How long ZeRO's collectives took, and what compute waited for them, on a clock set by hand.

DeepSpeed itself is in ``tests/distributed/test_zero_plans.py``.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_pyao.auto.collective_times import CollectiveTimes
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.measure.profile import StepProfiler

CPU = torch.device("cpu")
PART = torch.zeros(1024)
"""Of two ranks' parts; a gather receives as much."""


class Clock(BlockingTransport):
    """Marks are what the test says the time is, in s."""

    now_ms = 0.0

    def mark(self, device: torch.device) -> float:
        return self.now_ms / 1e3


class Backend:
    """What DeepSpeed runs collectives by."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.futures: list[Any] = []

    def all_gather_into_tensor(self, **given: Any) -> Any:
        future: Any = torch.futures.Future()
        self.futures.append(future)
        return SimpleNamespace(get_future=lambda: future)

    def all_reduce(self, tensor: Tensor, group: Any = None) -> None:
        self.clock.now_ms += 4


class Coordinator:
    """Gathers in 5 ms, of which 2 pass before the host has queued it, and 1 after its end."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def fetch_sub_module(self, module: nn.Module, forward: bool) -> None:
        clock = self.backend.clock
        clock.now_ms += 2
        given = {"output_tensor": torch.zeros(2048), "input_tensor": PART, "group": GROUP}
        self.backend.all_gather_into_tensor(**given)
        clock.now_ms += 3
        self.backend.futures.pop().set_result(None)
        clock.now_ms += 1


GROUP = SimpleNamespace(size=lambda: 2)


def test_compute_waits_only_while_a_collective_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    backend = Backend(clock)
    coordinator = Coordinator(backend)
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_coordinator=coordinator))
    monkeypatch.setattr("hf_pyao.auto.collective_times.zero_engine_of", lambda model: engine)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    times = CollectiveTimes(clock, CPU)
    profiler = StepProfiler(clock, CPU, 1, lambda _: None)

    times.start(model)
    coordinator.fetch_sub_module(model, forward=True)  # before all layers
    for phase in ("forward", "backward"):
        profiler.on_module("0", "", phase, is_start=True)
        coordinator.fetch_sub_module(model, forward=phase == "forward")
        clock.now_ms += 7
        profiler.on_module("0", "", phase, is_start=False)
        if phase == "forward":
            coordinator.fetch_sub_module(model, forward=True)  # in the head
        else:
            backend.all_reduce(torch.zeros(1024), group=GROUP)  # behind all layers
    times.stop()
    coordinator.fetch_sub_module(model, forward=True)  # no longer seen
    assert not set(vars(backend)) & {"all_gather_into_tensor", "all_reduce"}
    assert "fetch_sub_module" not in vars(coordinator)

    assert [taken_ms for _, taken_ms in times.waits()] == pytest.approx([3, 3, 3, 3, 4])
    found = profiler.within_ms(times.waits())
    assert found == pytest.approx({"forward": 3, "head": 3, "backward": 3})
    # A reduction is received twice over, a half of it each time.
    received, taken_ms = 4 * PART.nbytes + PART.nbytes, 4 * 3 + 4
    assert times.gib_per_s() == pytest.approx(received / GIB / taken_ms * 1e3)


def test_what_is_queued_behind_another_begins_at_its_end() -> None:
    clock = Clock()
    times = CollectiveTimes(clock, CPU)
    for nbytes, begins_s, ends_s in ((GIB, 0.0, 1.0), (GIB, 0.2, 2.0), (GIB, 3.0, 4.0)):
        times._spans.append((("all_gather", nbytes), [begins_s, ends_s]))
    assert times.gib_per_s() == pytest.approx(1.0)
    assert times.waits() == ()
