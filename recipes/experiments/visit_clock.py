"""The time of a zeroth-order step on a virtual clock: compute, uploads, copies back.

The decisions are those of ``engine/transfer/ring_schedule.py``; the waits are those of [Note:
Visits] in ``engine/zeroth_order/visits.py``. Three lanes run beside each other: compute, the link
to the device, and the link to the host. With ``transfer_dtype`` the waits are those of [Note:
Packed visits], and the host is a fourth lane.

Where both copies are the busiest lanes of the first pass, two slots are one too few: a slot is
taken for an upload, an update and a copy back, so a block takes at least half of their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule


@dataclass(frozen=True)
class VisitTimes:
    """What the visit of one block takes, in ms."""

    compute_ms: float
    """Update and both passes."""
    upload_ms: float
    """One of the two uploads, one for each pass."""
    offload_ms: float
    """The copy back of the updated weights, in the first pass."""
    update_ms: float = 0.0
    """The part of :attr:`compute_ms` before the copy back can begin."""
    host_ms: float = 0.0
    """With ``transfer_dtype``: update and packing on the host, before the first upload."""

    @property
    def pass_ms(self) -> float:
        """Compute of one pass."""
        return (self.compute_ms - self.update_ms) / 2


class VisitClock(RingSchedule):
    """Runs visits on a virtual clock.

    Args:
        blocks: in forward order.
        num_slots: slots of the ring.
        is_packed: weights travel in a ``transfer_dtype``: nothing is uploaded across the end of a
            pass, behind which the host may make an update first.
    """

    def __init__(
        self, blocks: Sequence[VisitTimes], num_slots: int = NUM_SLOTS, *, is_packed: bool = False
    ) -> None:
        super().__init__(len(blocks), num_slots)
        self._is_packed = is_packed
        self._blocks = tuple(blocks)
        self.compute_ms = 0.0
        """When compute has run all that is queued."""
        self._host_free_ms = 0.0
        self._upload_free_ms = 0.0
        self._offload_free_ms = 0.0
        self._here_ms: dict[int, float] = {}
        """By block, when its newest upload ends."""
        self._back_ms: dict[int, float] = {}
        """By block, when its newest copy back ends."""
        self._left_by: list[int | None] = [None] * num_slots
        self._packed: set[int] = set()
        """Blocks that the host has updated in this step."""

    def _upcoming(self) -> Iterator[int]:
        if self._is_packed:
            return iter(self._orders[self._trains][self._position :])
        return super()._upcoming()

    def upload(self, block: int, slot: int) -> None:
        """Let the link to the device copy *block*, behind compute and the copies back of both."""
        left = self._left_by[slot]
        after = [self._back_ms.get(each, 0.0) for each in (block, left) if each is not None]
        if self._is_packed and block not in self._packed:
            self._packed.add(block)
            self._host_free_ms = max(self._host_free_ms, after[0]) + self._blocks[block].host_ms
        start = max(self._upload_free_ms, self.compute_ms, self._host_free_ms, *after)
        self._upload_free_ms = self._here_ms[block] = start + self._blocks[block].upload_ms
        self._left_by[slot] = block

    def step_ms(self) -> float:
        """Run a step; return how long it takes until compute and copies back have ended."""
        start = self.compute_ms
        if self._is_packed:
            self._host_free_ms = max(self._host_free_ms, start)  # it waits for the losses
            self._packed.clear()
            for held in range(self.num_blocks):
                self.forget(held)
        for is_first in (True, False):
            self.begin(trains=False)
            self.current = None
            for number, block in enumerate(self._blocks):
                self.use(number, in_backward=False)
                begin = max(self.compute_ms, self._here_ms[number])
                self.compute_ms = begin  # what is queued so far; the pass comes behind
                self.ahead()
                begin = max(begin, self._host_free_ms) if self._is_packed else begin
                if is_first:
                    begin += block.update_ms
                    self._offload_free_ms = max(begin, self._offload_free_ms) + block.offload_ms
                    self._back_ms[number] = self._offload_free_ms
                self.compute_ms = begin + block.pass_ms
        return max(self.compute_ms, self._offload_free_ms) - start


def least_step_ms(blocks: Sequence[VisitTimes]) -> float:
    """Return the lower bound: the busiest of the lanes, of one pass and of the other."""
    compute = sum(each.pass_ms for each in blocks)
    uploads = sum(each.upload_ms for each in blocks)
    first = (
        compute + sum(each.update_ms for each in blocks),
        uploads,
        sum(each.offload_ms for each in blocks),
        sum(each.host_ms for each in blocks),
    )
    return max(first) + max(compute, uploads)
