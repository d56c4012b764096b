"""Slots that stay on the device: until when each holds the buffer that it is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence

from hf_pyao.plan.step.step_program import StepProgram


class KeptSlots:
    """Slots that stay, where nothing else holds their buffers.

    When such a buffer is let go follows from the program alone.

    Args:
        program: the step.
        leaves: for each slot, whether it leaves the device.
        rebuilds: slots that are dropped.
        made_again: buffers that are reloaded or rebuilt.
    """

    def __init__(
        self,
        program: StepProgram,
        leaves: Sequence[bool],
        rebuilds: Container[int],
        made_again: Container[int],
    ) -> None:
        slots, buffers = program.slots, program.buffers
        self.slots: set[int] = set()
        """Those that stay and hold nothing, or what nothing else holds."""
        self.held: set[int] = set()
        """Buffers that other slots hold."""
        self.last: dict[int, int] = {}
        """By slot, the buffer that is let go when backward is done with the slot. Its operations
        are over by then."""
        by_source: defaultdict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(slots):
            if leaves[number]:
                self.held.add(slot.source)
            elif slot.link_bytes and number not in rebuilds:
                if slot.source < 0 or slot.reloaded < 0:
                    self.slots.add(number)
                else:
                    by_source[slot.source].append(number)
        for source, numbers in by_source.items():
            if source in self.held or source in made_again:
                self.held.add(source)
                continue
            death = buffers[source].death
            ends = [buffers[slots[number].reloaded].death for number in numbers]
            lefts = [slots[number].left_at for number in numbers]
            if max(lefts) > death or any(left > end for left, end in zip(lefts, ends, strict=True)):
                self.held.add(source)
                continue
            self.slots.update(numbers)
            until = max(ends)
            if until >= death:
                newest = max(n for n, end in zip(numbers, ends, strict=True) if end == until)
                self.last[newest] = source
        self.held.discard(-1)
