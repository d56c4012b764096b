"""Slots that find no room on the host: when a disk has written them, and when it has read them.

The engine's rules ([Note: Bytes on a disk] in ``engine/stores/disk_store.py``), by arithmetic:

- A slot goes to the disk if the host has no room for it when it leaves.
- One access runs at a time, and takes what its bytes need at the disk's speed. A write begins once
  the copy to the host has ended.
- Where the host memory in front of the disk holds nothing but bytes that are not written yet, the
  thread that queues compute waits.
- The newest bytes are still in that memory when backward begins, and are not read. Others are read
  in the order in which they are asked for, each as soon as bytes that were asked for before have
  left the memory. The copy to the device begins behind the read, and shares its engine with the
  other copies.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hf_pyao.plan.hardware.speeds import DiskModel
from hf_pyao.plan.predict.copy_lanes import Copy
from hf_pyao.plan.predict.step_clock import LanesClock


class _Write(NamedTuple):
    nbytes: int
    copy: Copy
    """To the host."""


class PredictedDisk:
    """The disk below the host.

    Args:
        disk: its speeds.
        clock: says when copies end, and where compute is.
    """

    def __init__(self, disk: DiskModel, clock: LanesClock) -> None:
        self.disk = disk
        self.written_bytes = 0
        self.read_bytes = 0
        self._clock = clock
        self._free_ms = 0.0
        """When the disk has done all that is worked out so far."""
        self._writes: deque[_Write] = deque()
        """Those that are not worked out yet."""
        self._written: deque[tuple[float, int]] = deque()
        """When those end that are, and their bytes."""
        self._unwritten_bytes = 0
        self._on_disk: dict[int, int] = {}
        """Bytes of the slots that are there, oldest first."""
        self._near: set[int] = set()
        """Those of them that memory still has as backward begins."""
        self._asked: list[tuple[int, Copy]] = []
        """Bytes that were asked for in all, and the copy with which they left the memory."""

    def has(self, number: int) -> bool:
        """Say whether slot *number* is on the disk."""
        return number in self._on_disk

    def offload(self, number: int, nbytes: int, copy: Copy) -> None:
        """Take a slot, behind its *copy* to the host; compute waits until memory has room."""
        now_ms = self._clock.now_ms
        while self._written and self._written[0][0] <= now_ms:
            self._unwritten_bytes -= self._written.popleft()[1]
        while self._unwritten_bytes and self._unwritten_bytes + nbytes > self.disk.memory_bytes:
            if not self._written:
                self._work_out_a_write()
            end_ms, written_bytes = self._written.popleft()
            self._unwritten_bytes -= written_bytes
            self._clock.wait_until(end_ms, number)
        self._writes.append(_Write(nbytes, copy))
        self._unwritten_bytes += nbytes
        self._on_disk[number] = nbytes
        self.written_bytes += nbytes
        self._near.clear()
        self._asked.clear()

    def reload(self, number: int, copy: Copy) -> float:
        """Return when a slot's bytes are in memory, so that *copy*, back to the device, may begin.

        Slots are asked for the newest first.
        """
        if not self._asked:
            self._begin_backward()
        nbytes = self._on_disk[number]
        before = self._asked[-1][0] if self._asked else 0
        self._asked.append((before + nbytes, copy))
        if number in self._near:
            return self._clock.now_ms
        self.read_bytes += nbytes
        begin_ms = self._free_ms
        must_have_left = before + nbytes - self.disk.memory_bytes
        for left, earlier in self._asked[:-1]:
            if left >= must_have_left > 0:
                begin_ms = max(begin_ms, self._clock.end_of(earlier))
                break
        self._free_ms = begin_ms + self.disk.read_ms(nbytes)
        return max(self._clock.now_ms, self._free_ms)

    def end(self, number: int) -> None:
        """Let a slot go."""
        self._on_disk.pop(number, None)

    def _work_out_a_write(self) -> None:
        nbytes, copy = self._writes.popleft()
        begin_ms = max(self._free_ms, self._clock.end_of(copy))
        self._free_ms = begin_ms + self.disk.write_ms(nbytes)
        self._written.append((self._free_ms, nbytes))

    def _begin_backward(self) -> None:
        while self._writes:
            self._work_out_a_write()
        left_bytes = self.disk.memory_bytes
        for number, nbytes in reversed(self._on_disk.items()):
            left_bytes -= nbytes
            if left_bytes < 0:
                return
            self._near.add(number)
