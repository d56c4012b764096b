"""Exact bytes that torch's CPU allocator handed out, over time."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class AllocationLedger:
    """Context manager that counts allocations and releases on the CPU while it is open.

    Read from the allocator's own events through the profiler, not from a dispatch mode: under a
    dispatch mode autograd adds gradients out of place, and there would be one more copy of them.
    """

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self.peak_bytes = 0
        """Most bytes alive at once that were allocated since entry."""
        self.live_bytes = 0
        """Bytes alive at exit less those at entry."""
        self.largest_bytes = 0
        """Largest single allocation."""

    def __enter__(self) -> AllocationLedger:
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        profiler: Any = self._profile.profiler
        events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.live_bytes += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.largest_bytes = max(self.largest_bytes, event.nbytes())
