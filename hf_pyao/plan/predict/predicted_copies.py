"""The engine's schedule over the slots of a predicted step: their copies, and their memory.

What is decided, and when, is :mod:`hf_pyao.engine.transfer.schedule`, which the engine uses too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from hf_pyao.engine.stores.slabs import ALIGNMENT_BYTES
from hf_pyao.engine.transfer.schedule import Schedule, Window
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD, Copy
from hf_pyao.plan.predict.predicted_disk import PredictedDisk
from hf_pyao.plan.predict.predicted_memory import PredictedMemory
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.prediction import ENCODED, PAYLOAD, RELOADED, Coded
from hf_pyao.plan.step.step_program import StepProgram


class PredictedOffloads(Window):
    """Slots on their way to the host.

    Args:
        limit_bytes: see :class:`~hf_pyao.engine.transfer.schedule.Window`.
        program: the step.
        coded: slots that a codec writes smaller, by number.
        clock: when copies are done.
        memory: of the device.
        disk: where slots go that find no room on the host; None: the host has room for all.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        program: StepProgram,
        coded: Mapping[int, Coded],
        clock: StepClock,
        memory: PredictedMemory,
        disk: PredictedDisk | None = None,
    ) -> None:
        super().__init__(limit_bytes)
        self.disk = disk
        self.copies: dict[int, Copy] = {}
        """The (last) copy of each slot to the host."""
        self.coded = coded
        self.coding_ms = 0.0
        """What codecs took."""
        self.offloaded_bytes = 0
        self.host_peak_bytes = 0
        self._room_bytes = (
            math.inf if disk is None else disk.disk.room_for_saved(program.streamed.host_bytes)
        )
        self._host_bytes = 0
        """On the host and below it."""
        self._on_host_bytes = 0
        self._program = program
        self._clock = clock
        self._memory = memory

    def link_bytes(self, number: int) -> int:
        """Return what crosses the link for a slot, and is there of it when it is back."""
        coded = self.coded.get(number)
        return self._program.slots[number].link_bytes if coded is None else coded.nbytes

    def offload(self, number: int) -> None:
        """Queue the copy of a slot to the host, encoded if it is to be."""
        coded = self.coded.get(number)
        nbytes = self.link_bytes(number)
        if coded is None:
            self._queue(number, nbytes)
            self._memory.hold(self._program.slots[number].source)
        else:
            self.run_codec(coded)
            self._memory.allocate((PAYLOAD, number), coded.payload_bytes)
            for part_bytes in coded.parts:
                self._queue(number, part_bytes)
        self.offloaded_bytes += nbytes
        disk = self.disk
        if disk is not None and self._on_host_bytes + _in_pool(nbytes) > self._room_bytes:
            disk.offload(number, nbytes, self.copies[number])
        else:
            self._on_host_bytes += _in_pool(nbytes)
        self._host_bytes += _in_pool(nbytes)
        self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
        self.note_offload(number, nbytes)

    def run_codec(self, coded: Coded) -> None:
        """Encode or decode once."""
        self._clock.advance(coded.coding_ms)
        self.coding_ms += coded.coding_ms

    def release_host(self, number: int) -> None:
        """Give the host memory of a slot back."""
        in_pool_bytes = _in_pool(self.link_bytes(number))
        self._host_bytes -= in_pool_bytes
        if self.disk is not None and self.disk.has(number):
            self.disk.end(number)
        else:
            self._on_host_bytes -= in_pool_bytes

    def is_done(self, item: int) -> bool:
        """Say whether the host knows that the copy of a slot has left."""
        return self._clock.is_done(self.copies[item])

    def await_copies(self, items: Sequence[int]) -> None:
        """Wait for the newest copy, which stands for all."""
        if items:
            self._clock.wait(max((self.copies[item] for item in items), key=_order))

    def let_go(self, item: int) -> None:
        """Let the device copy of a slot go."""
        if item in self.coded:
            self._memory.free((PAYLOAD, item))
        else:
            self._memory.let_go(self._program.slots[item].source)

    def _queue(self, number: int, nbytes: int) -> None:
        copy = self.copies[number] = Copy(OFFLOAD, nbytes, self._clock.now_ms, slot=number)
        self._clock.book(copy)


class PredictedReloads(Schedule):
    """Slots on their way back, and in use.

    Args:
        offloads: their way to the host.
        program: the step.
        by_layer: the slots of each layer that leave, in the order in which backward asks for them.
        clock: when copies are done.
        memory: of the device.
    """

    def __init__(
        self,
        offloads: PredictedOffloads,
        program: StepProgram,
        by_layer: Mapping[int, Sequence[int]],
        clock: StepClock,
        memory: PredictedMemory,
    ) -> None:
        super().__init__(offloads)
        self.copies: dict[int, Copy] = {}
        """The copy of each slot back."""
        self.read_in_place_bytes = 0
        self._offloads = offloads
        self._program = program
        self._by_layer = by_layer
        self._clock = clock
        self._memory = memory
        self._reloaded_at: dict[int, int] = {}
        self._used: set[int] = set()
        """Slots that came back and were asked for."""
        self._in_place: set[int] = set()
        """Slots that are read in place."""
        self._over: set[int] = set()
        """Slots that backward is done with."""

    def start_layer(self, layer: int, upload: Callable[[], None]) -> None:
        """Begin the backward of *layer*: those before it follow.

        Args:
            layer: position of the layer.
            upload: queues streamed weights behind what *layer* asks for.
        """

        def others() -> Iterator[Sequence[int]]:
            upload()
            for each in range(layer - 1, -1, -1):
                group = self._by_layer.get(each, ())
                # As the engine: what was brought back already is not listed again.
                yield [number for number in group if number not in self.copies]

        self.start(self._by_layer.get(layer, ()), others())

    def use(self, number: int, *, is_read: bool = False) -> None:
        """Ask for a slot that has left, or waits to.

        Args:
            number: of the slot.
            is_read: it is read to rebuild another if it was not asked for before. As in the engine,
                room for what comes next is asked for behind the rebuild.
        """
        if number in self._used:
            return
        is_first = number not in self._in_place
        if number in self.window.waiting:
            if is_first:
                if not self._decode(number):
                    self._memory.hold(self._program.slots[number].source)
                self._in_place.add(number)
                self.read_in_place_bytes += self._program.slots[number].link_bytes
        else:
            if number not in self.copies:
                self.bring_back(number)
            self._clock.wait(self.copies[number])
            if self._decode(number):
                self._memory.free((ENCODED, number))
            self._used.add(number)
            self.note_use(number)
        if not self.is_exhausted and not (is_read and is_first):
            self.prefetch()

    def end(self, number: int) -> None:
        """End a slot: backward is done with it."""
        self._over.add(number)
        self.window.end(number)
        self._offloads.release_host(number)
        slot = self._program.slots[number]
        is_coded = number in self._offloads.coded
        if number in self.copies:
            is_encoded = is_coded and number not in self._used
            self._memory.free((ENCODED if is_encoded else RELOADED, number))
            self._memory.end_lifetime(slot.reloaded, self._reloaded_at[number])
        if number in self._in_place:
            if is_coded:
                self._memory.free((RELOADED, number))
            else:
                self._memory.let_go(slot.source)

    def is_away(self, item: int) -> bool:
        """Say whether a slot is on the host alone, and can still be asked for."""
        return not (
            item in self.copies
            or item not in self._offloads.copies
            or item in self._over
            or item in self.window.waiting
        )

    def bring_back(self, item: int) -> None:
        """Queue the copy of a slot to the device."""
        nbytes = self._offloads.link_bytes(item)
        needs = self._offloads.copies[item]
        copy = Copy(RELOAD, nbytes, self._clock.now_ms, needs=needs, slot=item)
        disk = self._offloads.disk
        if disk is not None and disk.has(item):
            copy.wait_until(disk.reload(item, copy))
        self.copies[item] = copy
        key = ENCODED if item in self._offloads.coded else RELOADED
        self._memory.allocate((key, item), nbytes)
        self._reloaded_at[item] = self._memory.operation
        self._clock.book(copy)
        self.note_reload(item, nbytes)

    def await_reload(self, item: int) -> None:
        """Wait for the copy of a slot to the device, if there is one."""
        copy = self.copies.get(item)
        if copy is not None and item not in self._over:
            self._clock.wait(copy)

    def _decode(self, number: int) -> bool:
        """Decode a slot, if it was encoded; say whether it was."""
        coded = self._offloads.coded.get(number)
        if coded is None:
            return False
        self._offloads.run_codec(coded)
        self._memory.allocate((RELOADED, number), self._program.slots[number].link_bytes)
        return True


def _order(copy: Copy) -> int:
    return copy.order


def _in_pool(nbytes: int) -> int:
    """Return what a buffer takes of the host pool."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
