"""What went to a disk and came back, and how much may yet be written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

TB = 10**12

FEWER_BYTES = (
    "Segments of k layers (checkpoint_every=k) divide the bytes that are written by about k or "
    "more: try them first. Else raise disk_write_limit, if the drive endures it."
)
"""What to do where too much is written."""

SAY_AFTER_S = 120.0
"""After so much time the bytes per hour are said."""


@dataclass
class DiskFigures:
    """What a disk was asked for so far."""

    written_bytes: int = 0
    """Bytes that were written, padding included."""
    read_bytes: int = 0
    """Bytes that were read and agreed with their checksums, padding included."""
    forwarded_bytes: int = 0
    """Bytes that were asked for while the memory still had them: they were not read."""
    stall_ms: float = 0.0
    """Time in which the caller waited for the disk, both directions."""
    write_ms: float = 0.0
    """Time in which some thread wrote."""
    read_ms: float = 0.0
    """Time in which some thread read."""
    check_ms: float = 0.0
    """Time in which threads computed checksums."""
    num_retries: int = 0
    """Accesses that failed and were tried again."""

    def since(self, before: DiskFigures) -> DiskFigures:
        """Return what was added to *before*."""
        return DiskFigures(
            **{
                field.name: getattr(self, field.name) - getattr(before, field.name)
                for field in dataclasses.fields(self)
            }
        )

    @property
    def write_gib_per_s(self) -> float | None:
        """Speed of the disk while it was written, in GiB/s (2**30 bytes); None: it was not."""
        return speed(self.written_bytes, self.write_ms)

    @property
    def read_gib_per_s(self) -> float | None:
        """Speed of the disk while it was read, in GiB/s (2**30 bytes); None: it was not."""
        return speed(self.read_bytes, self.read_ms)

    def copy(self) -> DiskFigures:
        """Return the same figures, which no longer change."""
        return dataclasses.replace(self)


def speed(nbytes: int, elapsed_ms: float) -> float | None:
    """Return bytes over time in GiB/s (2**30 bytes); None without either."""
    return nbytes / 2**30 / (elapsed_ms / 1e3) if nbytes and elapsed_ms else None


class BusyClock:
    """Measures the time in which at least one of several threads does something.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_busy = 0
        self._began_s = 0.0

    def begin(self) -> None:
        """Note that one more begins."""
        if not self._num_busy:
            self._began_s = time.perf_counter()
        self._num_busy += 1

    def end(self) -> float:
        """Note that one ends; return the time in ms that it adds: 0 while others go on."""
        self._num_busy -= 1
        return 0.0 if self._num_busy else 1e3 * (time.perf_counter() - self._began_s)


class WriteLimit:
    """How much may be written to a disk in a run.

    Args:
        limit_bytes: most bytes.
        clock: returns the time in seconds.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        """Bytes that were written, or may be."""
        self._clock = clock
        self._began_s: float | None = None
        """When the first bytes were taken."""
        self._is_said = False

    def take(self, nbytes: int) -> bool:
        """Count *nbytes* that are to be written; False if they are too many."""
        if self.taken_bytes + nbytes > self.limit_bytes:
            return False
        if self._began_s is None:  # not before: a model may be attached long before it trains
            self._began_s = self._clock()
        self.taken_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Count *nbytes* no longer: they were not written."""
        self.taken_bytes -= nbytes

    def rate(self) -> str:
        """Return how much is written in an hour, and when the limit comes; empty: not known."""
        elapsed_s = self._elapsed_s()
        if elapsed_s <= 0 or not self.taken_bytes:
            return ""
        per_hour = self.taken_bytes / elapsed_s * 3600
        hours = (self.limit_bytes - self.taken_bytes) / per_hour
        return (
            f"{self.taken_bytes / TB:.3g} TB of saved tensors were written to the disk, "
            f"{per_hour / TB:.3g} TB an hour. disk_write_limit={self.limit_bytes / TB:g} TB "
            f"is reached in {hours:,.1f} hours"
        )

    def sentence_once(self) -> str:
        """Return :meth:`rate` once, after :data:`SAY_AFTER_S`; else nothing."""
        if self._is_said or self._elapsed_s() < SAY_AFTER_S:
            return ""
        sentence = self.rate()
        self._is_said = bool(sentence)
        return sentence

    def _elapsed_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s
