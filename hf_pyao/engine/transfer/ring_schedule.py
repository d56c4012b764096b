"""The schedule of streamed blocks: which block is uploaded next, into which slot, and when.

A block is what a decoder layer has on the host: its frozen weights. The device has a ring of a few
slots, each of which holds one block at a time. ``engine.weights`` carries the decisions out with
copies and events, and a predictor may do so with sizes on a virtual clock: like ``schedule``, this
is arithmetic on integers, and knows no torch. Source of the idea: ZO2 (arXiv 2503.12668), section 4
(one or two blocks on the device, uploads ahead of compute), here for forward and backward.

The rules:
- Blocks are used in an order that is like that of the cycle before. A cycle is a forward and its
  backward; several forwards before a backward belong to one cycle; a forward without gradients is
  one. The first cycle is taken to run through all blocks, and back.
- A block that is used and not in a slot is uploaded then, and compute waits.
- :meth:`RingSchedule.ahead` uploads the blocks that come next into slots whose blocks come later
  than these, or never. The block in use stays. So the blocks at the turn from forward to backward,
  and from one step to the next, are uploaded once: N blocks and B slots take 2N - B uploads in the
  first step and 2(N - B) in each later one.
- Nothing is copied back: the host has the bytes.

An order that was predicted wrongly costs time, and changes no result.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Sequence

NUM_SLOTS = 2
"""Slots of a ring: the block in use, and the next one."""

_MOST_RECORDED = 16
"""Uses per block and cycle up to which the order is recorded."""


def resident_layers(num_layers: int, num_resident: int) -> tuple[int, ...]:
    """Return which layers stay on the device if *num_resident* do: evenly spread over the depth.

    So each streamed block has about the same compute before it to be uploaded under.
    """
    num_resident = min(num_resident, num_layers)
    return tuple((2 * k + 1) * num_layers // (2 * num_resident) for k in range(num_resident))


def uploaded_bytes(sizes: Sequence[int], num_slots: int = NUM_SLOTS) -> int:
    """Return the bytes of the uploads of a forward and its backward, behind the first ones.

    Args:
        sizes: of the blocks in forward order, in bytes.
        num_slots: slots of the ring.
    """
    if len(sizes) <= num_slots:
        return 0
    return 2 * sum(sizes) - sum(sizes[:num_slots]) - sum(sizes[-num_slots:])


class RingSchedule(abc.ABC):
    """Decides which blocks are in the slots of a ring.

    The driver calls, in the order in which compute is queued:

    - :meth:`begin` when a forward of the model begins;
    - :meth:`use` when compute is about to read a block, in forward, in a second run, in backward;
      then it waits for that block's upload;
    - :meth:`leave` when compute goes on with a layer that is not streamed;
    - :meth:`ahead` after :meth:`use` or :meth:`leave`, as soon as the lane may take the next
      upload: in backward behind the reloads of the layer that begins.

    The subclass carries out :meth:`upload`, which is called from :meth:`use` and :meth:`ahead`.

    Args:
        num_blocks: blocks that are streamed, numbered in forward order.
        num_slots: slots of the ring.
    """

    def __init__(self, num_blocks: int, num_slots: int = NUM_SLOTS) -> None:
        self.num_blocks = num_blocks
        self.slots: list[int | None] = [None] * num_slots
        """By slot the block that it holds, or that is on its way there."""
        self.current: int | None = None
        """The block in use; no upload takes its slot."""
        self.num_uploads = 0
        self.num_late_uploads = 0
        """Those of blocks that were used before an upload ahead of them had begun."""
        there = list(range(num_blocks))
        self._orders: dict[bool, Sequence[int]] = {True: [*there, *there[::-1]], False: there}
        """By whether gradients are computed, the blocks in the order of the newest such cycle."""
        self._trains = True
        self._position = 0
        """Where in its order the cycle is: the place of the block that is expected next."""
        self._recorded: list[int] = []
        """The blocks used in this cycle, once for each time that compute came to one."""
        self._has_run_back = False

    # ---- carried out by the subclass -----------------------------------------------------------

    @abc.abstractmethod
    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* to *slot*, behind all readers of the slot queued so far."""

    # ---- what happens --------------------------------------------------------------------------

    def begin(self, *, trains: bool) -> None:
        """Note that a forward of the model begins; *trains*: with gradients."""
        if trains and self._trains and not self._has_run_back:
            return  # another forward before the first backward, or nothing has run yet
        if self._recorded and len(self._recorded) < _MOST_RECORDED * self.num_blocks:
            self._orders[self._trains] = self._recorded
        self._recorded = []
        self._position = 0
        self._trains = trains
        self._has_run_back = False

    def use(self, block: int, *, in_backward: bool) -> int:
        """Have *block* in a slot; return the slot.

        Args:
            block: what compute reads next.
            in_backward: a backward pass runs; what runs a second time in it is meant too.
        """
        turns = in_backward and not self._has_run_back
        self._has_run_back |= in_backward
        if block != self.current or not self._recorded:
            self._record(block)
            self.current = block
        elif turns:
            self._turn(block)
        if block in self.slots:
            return self.slots.index(block)
        self.num_late_uploads += 1
        slot = self._latest(())
        assert slot is not None
        self._put(block, slot)
        return slot

    def leave(self, *, in_backward: bool) -> None:
        """Note that compute is done with the block in use, and goes on with a resident layer."""
        self._has_run_back |= in_backward
        self.current = None

    def ahead(self) -> None:
        """Upload what is used next into slots whose blocks are used later than that."""
        sooner: list[int] = []
        for block in self._upcoming():
            if block in sooner:
                continue
            if block not in self.slots:
                slot = self._latest(sooner)
                if slot is None:
                    return
                self._put(block, slot)
            sooner.append(block)
            if len(sooner) >= len(self.slots):
                return

    def coming(self, number: int) -> list[int]:
        """Return the next *number* blocks that will be uploaded, in order, as far as is known.

        Nothing is uploaded by this.
        """
        absent = (block for block in self._upcoming() if block not in self.slots)
        return list(itertools.islice(dict.fromkeys(absent), number))

    def forget(self, block: int) -> None:
        """Note that the slot that held *block* does not hold it any more."""
        if block in self.slots:
            self.slots[self.slots.index(block)] = None
        if block == self.current:
            self.current = None

    # ---- the order -----------------------------------------------------------------------------

    def _record(self, block: int) -> None:
        if len(self._recorded) < _MOST_RECORDED * self.num_blocks:
            self._recorded.append(block)
        order = self._orders[self._trains]
        for step in range(len(order)):
            place = (self._position + step) % len(order)
            if order[place] == block:
                self._position = place + 1
                return

    def _turn(self, block: int) -> None:
        """Note that backward begins with the block that forward ended with.

        That is one use, for which an order that was not recorded has two places.
        """
        order = self._orders[self._trains]
        if self._position < len(order) and order[self._position] == block:
            self._position += 1

    def _upcoming(self) -> Iterator[int]:
        """Yield the blocks in the order in which they are expected: this cycle's, then the next's.

        The next cycle is taken to be like this one.
        """
        order = self._orders[self._trains]
        yield from order[self._position :]
        yield from order

    def _latest(self, sooner: Sequence[int]) -> int | None:
        """Return an empty slot, or the one whose block is used last; None if none may be taken.

        Args:
            sooner: blocks that are used before what the slot is for: they stay.
        """
        if None in self.slots:
            return self.slots.index(None)
        candidates = [
            block
            for block in self.slots
            if block is not None and block != self.current and block not in sooner
        ]
        if not candidates:
            return None
        next_use = {block: place for place, block in reversed(list(enumerate(self._upcoming())))}
        return self.slots.index(max(candidates, key=lambda b: next_use.get(b, len(next_use) + 1)))

    def _put(self, block: int, slot: int) -> None:
        self.slots[slot] = None  # an interrupt may come: the old bytes are overwritten then
        self.upload(block, slot)
        self.slots[slot] = block
        self.num_uploads += 1
