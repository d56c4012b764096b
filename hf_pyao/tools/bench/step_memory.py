"""The most bytes that a step adds to what is allocated, on a device or on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_pyao.tools.bench.memory import DeviceMemory


def peak_of_step(device: torch.device, run: Callable[[], object]) -> int | None:
    """Run *run*; return the most bytes that were allocated in it above those before it.

    On an accelerator these are the caching allocator's own figures. A CPU's allocator keeps none:
    there torch's profiler writes down each allocation and each release. It sees all tensors of the
    process, whoever made them, in forward and in backward, compiled or not. Memory that torch does
    not allocate is not among them, nor is the release of what was allocated before *run*.

    Returns:
        Bytes; None where the device's allocator tells none.
    """
    if device.type == "cpu":
        return _peak_on_a_cpu(run)
    memory = DeviceMemory(device)
    memory.synchronize()
    before_bytes = memory.allocated_bytes()
    memory.reset_peaks()
    run()
    memory.synchronize()
    peak_bytes = memory.peak_allocated_bytes()
    return None if peak_bytes is None or before_bytes is None else peak_bytes - before_bytes


def _peak_on_a_cpu(run: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    allocations = [event for event in results.events() if event.name() == "[memory]"]
    held_bytes = peak_bytes = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes
