"""What an engine did so far: the figures of its last micro-batch, and their sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hf_pyao.engine.transfer.mover import Mover
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.metrics import MicroBatchStats, RunTotals

_MOST_LATE = 4
"""Micro-batches by which a host may run ahead of its device."""


class RunFigures:
    """Counts micro-batches.

    Args:
        mover: knows how long their copies took.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.totals = RunTotals()
        self.last: MicroBatchStats | None = None
        """Figures of the last micro-batch that was counted; None before the first."""
        self._on_counted: Callable[[int], None] | None = None
        self._late_times: deque[tuple[MicroBatchStats, LinkTimes]] = deque(maxlen=_MOST_LATE)
        """Micro-batches that were counted, some of whose copies may not be timed yet."""

    def tell_when_counted(self, listener: Callable[[int], None]) -> None:
        """Tell *listener* of each micro-batch that is counted: how many there are by now."""
        self._on_counted = listener

    def count(self, stats: MicroBatchStats) -> None:
        """Add a micro-batch whose backward is over."""
        self.settle_times()
        times = self._mover.collect(stats)
        self.last = stats
        self.totals.add(stats)
        self._late_times.append((stats, times))
        if self._on_counted is not None:
            self._on_counted(self.totals.num_micro_batches)

    def settle_times(self) -> None:
        """Add the durations of copies that are known by now to the newest micro-batches.

        The host counts a micro-batch when it has queued its backward, long before the device runs
        it. After a synchronization the figures of the last micro-batch are complete.
        """
        for stats, times in list(self._late_times):
            before = stats.link_times_ms
            self._mover.collect_times(stats, times)
            self.totals.add_link_times(before, stats.link_times_ms)
