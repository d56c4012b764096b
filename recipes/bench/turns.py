"""What benches of one process share: ways that take turns, and the bytes that a step allocates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_pyao.plan.documents.bench import StepTimes

NUM_WARMUP = 1


def times_in_turns(ways: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, Any]:
    """Run *ways* in turns; return the times of each, as ``<way>_wall`` and ``<way>_cpu``.

    Processor time is what other processes on the machine disturb less.
    """
    times_ms: dict[str, list[float]] = {f"{way}_{c}": [] for c in ("wall", "cpu") for way in ways}
    for turn in range(NUM_WARMUP + num_rounds):
        for way in list(ways) if turn % 2 else reversed(list(ways)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            ways[way]()
            times_ms[f"{way}_wall"].append((time.perf_counter() - wall_s) * 1e3)
            times_ms[f"{way}_cpu"].append((time.process_time() - cpu_s) * 1e3)
    return {
        name: StepTimes.of(values[NUM_WARMUP:], NUM_WARMUP) for name, values in times_ms.items()
    }


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes that one step has allocated at once, by the allocator's own events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        step()
    profiler: Any = profile.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    live, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
