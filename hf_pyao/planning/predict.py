"""Predicts a step under a plan: time, stalls, and the peak on device and host, with what sets it.

Arithmetic on a :class:`~hf_pyao.planning.step_program.StepProgram`. It walks through the operations
once and does with each slot what the engine would do: queue its copy, hold its memory until that is
done, bring it back as the window allows. No tensor is made, and no code is shared with the
simulation, which judges it: only the table of costs.

A step of twenty layers takes some tens of milliseconds to predict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hf_pyao.hardware.host_model import FAR_AHEAD, HostClock, HostModel
from hf_pyao.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.planning.copy_lanes import (
    GRADIENT,
    OFFLOAD,
    RELOAD,
    Copy,
    Lanes,
    LateLanes,
    TimedLanes,
)
from hf_pyao.planning.prediction import (
    BUFFER,
    ENCODED,
    FREED,
    PAYLOAD,
    RELOADED,
    WORKSPACE,
    Coded,
    Lifetime,
    MemoryEvent,
    MemoryKey,
    PredictedCopy,
    Prediction,
    Rebuild,
    Stall,
)
from hf_pyao.planning.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    Segment,
    SlotUse,
    StepProgram,
)
from hf_pyao.planning.windows import Windows
from hf_pyao.stores.slabs import ALIGNMENT_BYTES


def predict(
    program: StepProgram,
    leaves: Sequence[bool],
    *,
    window_bytes: int | None,
    device: DeviceModel | None = None,
    times_ms: Sequence[float] | None = None,
    link: LinkModel | None = None,
    rebuilds: Mapping[int, Rebuild] | None = None,
    gradient_bytes: int = 0,
    coded: Mapping[int, Coded] | None = None,
    host: HostModel = FAR_AHEAD,
) -> Prediction:
    """Predict the step.

    Args:
        program: the step.
        leaves: for each slot of the program, whether it is offloaded; what stays, stays.
        window_bytes: what may be in flight; None: compute and copies meet at the end of each layer.
        device: speeds; None: no times are predicted, unless they are given.
        times_ms: what each operation takes, in place of *device*.
        link: speeds of copies; None: they are never done before something waits for them, so that
            the peak is one for every link.
        rebuilds: slots that are dropped and rebuilt, by number, see ``planned_step``; they neither
            stay nor leave. Buffers that they make are those of the program.
        gradient_bytes: what leaves for the host beside whenever a layer's backward ends, as for an
            optimizer there.
        coded: slots that a codec writes smaller where they leave, by number.
        host: how far the host runs ahead of the device. The default sees no copy done, so that it
            gives the most memory.

    Raises:
        ValueError: *leaves* is not as long as the program's slots, or *times_ms* not as its
            operations.
    """
    if len(leaves) != len(program.slots):
        raise ValueError(f"leaves has {len(leaves)} entries; the program has {len(program.slots)}")
    if times_ms is None and device is not None:
        times_ms = operation_times_ms(program, device)
    if times_ms is not None and len(times_ms) != program.num_operations:
        raise ValueError(
            f"times_ms has {len(times_ms)} entries; the program has {program.num_operations}"
        )
    lanes: Lanes = LateLanes() if link is None else TimedLanes(link)
    walk = _Walk(program, leaves, window_bytes, times_ms, lanes, rebuilds or {}, gradient_bytes)
    walk.coded = coded or {}
    walk.host = HostClock(host)
    prediction = walk.run()
    if times_ms is None or link is None:
        return prediction
    return replace(prediction, copies=walk.all_copies(), stalls=tuple(walk.stalls))


def operation_times_ms(program: StepProgram, device: DeviceModel) -> list[float]:
    """Return what each operation of *program* takes on *device*; 0 for what runs no kernel."""
    return [
        device.op_ms(operation.flops, operation.traffic_bytes) * operation.num_runs
        if operation.is_kernel
        else 0.0
        for operation in program.operations
    ]


class _Walk:
    """One walk through a program."""

    def __init__(
        self,
        program: StepProgram,
        leaves: Sequence[bool],
        window_bytes: int | None,
        times_ms: Sequence[float] | None,
        lanes: Lanes,
        rebuilds: Mapping[int, Rebuild],
        gradient_bytes: int,
    ) -> None:
        self.program = program
        self.gradient_bytes = gradient_bytes
        self.coded: Mapping[int, Coded] = {}
        self.host = HostClock(FAR_AHEAD)
        self.times_ms = times_ms
        self.lanes = lanes
        self.rebuilds = rebuilds
        self.leaves = [
            leaves[number] and slot.link_bytes > 0 and number not in rebuilds
            for number, slot in enumerate(program.slots)
        ]
        self.now_ms = 0.0
        self.rebuild_ms = 0.0
        self.coding_ms = 0.0
        self.stall_ms = {FORWARD: 0.0, BACKWARD: 0.0}
        self.stalls: list[Stall] = []
        self.start_ms: list[float] = []
        self.phase = FORWARD
        self.number = 0
        """The operation that is walked to."""
        self.lifetimes: list[Lifetime] = []
        self.memory: list[MemoryEvent] = []
        self.allocated: dict[MemoryKey, int] = {}
        self.reloaded_at: dict[int, int] = {}
        self.is_rebuilt: set[int] = set()
        self.rebuilt_at: dict[int, int] = {}
        """Buffers that were rebuilt and are there, and since which operation."""
        self.live_bytes = program.resident_bytes
        self.peak_here = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self.offloaded_bytes = 0
        self.read_in_place_bytes = 0
        # What holds a source beside forward itself: slots that are kept, or have not left.
        self.holds = [0] * len(program.buffers)
        self.is_dead = [False] * len(program.buffers)
        self.offloads: dict[int, Copy] = {}
        self.reloads: dict[int, Copy] = {}
        self.is_read_in_place = [False] * len(program.slots)
        self.is_consumed: set[int] = set()
        self.is_over = [False] * len(program.slots)
        """Backward is done with the slot."""
        self._index()
        self.windows = Windows(window_bytes, self.by_layer)

    def _index(self) -> None:
        """Sort what happens by operation."""
        program, end = self.program, self.program.num_operations
        self.births: list[list[int]] = [[] for _ in range(end)]
        self.deaths: list[list[int]] = [[] for _ in range(end + 1)]
        self.ends: list[list[int]] = [[] for _ in range(end + 1)]
        self.packs: list[list[int]] = [[] for _ in range(end + 1)]
        self.first_packs: list[list[int]] = [[] for _ in range(end + 1)]
        """Those that a layer saves before its first operation: after the end of the one before."""
        begun = {(each.layer, each.start) for each in program.segments if each.phase == FORWARD}
        self.unpacks: list[list[int]] = [[] for _ in range(end + 1)]
        self.starts: dict[int, list[Callable[[], None]]] = {}
        self._is_reloaded = [False] * len(program.buffers)
        """Buffers that are not there just from birth to death: reloaded ones, and rebuilt ones."""
        for slot in program.slots:
            if slot.reloaded >= 0:
                self._is_reloaded[slot.reloaded] = True
        self.rebuilt_ends: list[list[int]] = [[] for _ in range(end + 1)]
        for rebuild in self.rebuilds.values():
            for again in rebuild.operations:
                for number in again.makes:
                    self._is_reloaded[number] = True
                    self.rebuilt_ends[program.buffers[number].death].append(number)
        for number, buffer in enumerate(program.buffers):
            if not self._is_reloaded[number]:
                self.births[buffer.birth].append(number)
                self.deaths[buffer.death].append(number)
        self.by_layer: dict[int, list[int]] = {}
        for number, slot in enumerate(program.slots):
            if slot.link_bytes == 0:
                for moment in slot.asked_again:
                    self.unpacks[moment].append(number)
                continue
            is_first = (slot.layer, slot.left_at) in begun
            (self.first_packs if is_first else self.packs)[slot.left_at].append(number)
            if slot.reloaded >= 0:
                for moment in (slot.unpacked_at, *slot.asked_again):
                    self.unpacks[moment].append(number)
                self.ends[program.buffers[slot.reloaded].death].append(number)
            if self.leaves[number]:
                self.by_layer.setdefault(slot.layer, []).append(number)
        for numbers in self.unpacks:
            numbers.sort(key=lambda number: program.slots[number].unpack_rank)
        before: Segment | None = None
        for segment in program.segments:
            events = self.starts.setdefault(segment.start, [])
            if before is not None and before.layer != OUTSIDE:
                if before.phase == FORWARD:
                    events.append(self._layer_end)
                elif self.gradient_bytes:
                    events.append(self._send_gradients)
            events.append(partial(self._enter, segment))
            before = segment

    def run(self) -> Prediction:
        """Walk."""
        program = self.program
        peaks: list[int] = []
        compute_ms = 0.0
        for number in range(program.num_operations):
            self.number = number
            self.peak_here = 0
            self._before(number)
            if self.times_ms is not None and self.times_ms[number]:
                self.now_ms = self.host.launch(self.now_ms)
            self.start_ms.append(self.now_ms)
            if self.times_ms is not None and self.times_ms[number]:
                self.now_ms += self.times_ms[number]
                self.host.ends(self.now_ms)
                compute_ms += self.times_ms[number]
            for buffer in self.deaths[number]:
                self._source_dies(buffer)
            for slot in self.ends[number]:
                self._slot_ends(slot)
            for buffer in self.rebuilt_ends[number]:
                self._free_rebuilt(buffer)
            for buffer in self.births[number]:
                self._allocate((BUFFER, buffer), program.buffers[buffer].nbytes)
            if inside_bytes := program.operations[number].workspace_bytes:
                self._allocate((WORKSPACE, number), inside_bytes)
                self._deallocate((WORKSPACE, number))
            peaks.append(max(self.peak_here, self.live_bytes))
        self.number = program.num_operations
        self._before(self.number)
        self._release_all(list(self.windows.waiting))  # as the engine does when backward ends
        for buffer, copy in enumerate(program.buffers):
            is_there = copy.death >= self.number or self.holds[buffer] > 0
            if is_there and not self._is_reloaded[buffer]:
                self.lifetimes.append(Lifetime(buffer, copy.birth, self.number))
        peak_bytes = max(peaks, default=program.resident_bytes)
        has_times = self.times_ms is not None
        return Prediction(
            step_ms=self.now_ms if has_times else math.nan,
            compute_ms=compute_ms + self.rebuild_ms + self.coding_ms if has_times else math.nan,
            stall_forward_ms=self.stall_ms[FORWARD],
            stall_backward_ms=self.stall_ms[BACKWARD],
            peak_bytes=peak_bytes,
            peak_at=peaks.index(peak_bytes) if peaks else 0,
            live_bytes=tuple(peaks),
            host_peak_bytes=self.host_peak_bytes,
            offloaded_bytes=self.offloaded_bytes,
            read_in_place_bytes=self.read_in_place_bytes,
            lifetimes=tuple(self.lifetimes),
            memory=tuple(self.memory),
            start_ms=tuple(self.start_ms) if has_times else (),
        )

    def all_copies(self) -> tuple[PredictedCopy, ...]:
        """Return the copies, those included that end when compute is over."""
        self.lanes.finish(self.now_ms)
        copies = [*self.offloads.values(), *self.reloads.values()]
        found = [PredictedCopy(c.direction, c.slot, c.start_ms, c.end_ms) for c in copies]
        return tuple(sorted(found, key=lambda copy: (copy.start_ms, copy.slot)))

    def _before(self, number: int) -> None:
        """Do what happens between two operations."""
        for slot in self.packs[number]:
            self._pack(slot)
        for event in self.starts.get(number, ()):
            event()
        for slot in self.first_packs[number]:
            self._pack(slot)
        for slot in self.unpacks[number]:
            self._unpack(slot)

    def _enter(self, segment: Segment) -> None:
        self.phase = segment.phase
        if segment.phase == BACKWARD and segment.layer != OUTSIDE:
            self._backward_start(segment.layer)

    # ---- memory --------------------------------------------------------------------------------

    def _allocate(self, key: MemoryKey, nbytes: int) -> None:
        self.memory.append(MemoryEvent(key, nbytes))
        self.allocated[key] = nbytes
        self.live_bytes += nbytes
        self.peak_here = max(self.peak_here, self.live_bytes)

    def _deallocate(self, key: MemoryKey) -> None:
        self.memory.append(MemoryEvent(key, FREED))
        self.live_bytes -= self.allocated.pop(key)

    def _source_dies(self, buffer: int) -> None:
        self.is_dead[buffer] = True
        if not self.holds[buffer]:
            self._free(buffer)

    def _free(self, buffer: int) -> None:
        self._deallocate((BUFFER, buffer))
        birth = self.program.buffers[buffer].birth
        self.lifetimes.append(Lifetime(buffer, birth, self.number))

    def _hold(self, slot: SlotUse) -> None:
        if slot.source >= 0:
            self.holds[slot.source] += 1

    def _let_go(self, slot: SlotUse) -> None:
        if slot.source < 0:
            return
        self.holds[slot.source] -= 1
        if self.is_dead[slot.source] and not self.holds[slot.source]:
            self._free(slot.source)

    # ---- forward -------------------------------------------------------------------------------

    def _pack(self, number: int) -> None:
        slot = self.program.slots[number]
        if not self.leaves[number]:
            if slot.reloaded >= 0 and number not in self.rebuilds:
                self._hold(slot)
            return
        coded = self._encoded(number)
        copied_bytes = self._link_bytes(number)
        for part in (copied_bytes,) if coded is None else coded.parts:
            copy = Copy(OFFLOAD, part, self.now_ms, slot=number)
            self.lanes.book(copy)
            self.offloads[number] = copy
        self.offloaded_bytes += copied_bytes
        self.host_bytes += _in_pool(copied_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        windows = self.windows
        if windows.limit_bytes is not None and not windows.waiting and self._is_known_done(number):
            if coded is not None:
                self._deallocate((PAYLOAD, number))
            return
        if coded is None:
            self._hold(slot)
        windows.add(number, copied_bytes)
        if windows.limit_bytes is None:
            return
        self._release_done()
        while windows.is_overfull:
            self._wait(self.offloads[windows.oldest])
            self._release(windows.oldest)

    def _link_bytes(self, number: int) -> int:
        """Return what crosses the link for a slot, and is there of it when it is back."""
        coded = self.coded.get(number)
        return self.program.slots[number].link_bytes if coded is None else coded.nbytes

    def _encoded(self, number: int) -> Coded | None:
        """Encode a slot, if it is to be: what it becomes is there beside what it was."""
        coded = self.coded.get(number)
        if coded is not None:
            self._run_codec(coded)
            self._allocate((PAYLOAD, number), coded.payload_bytes)
        return coded

    def _run_codec(self, coded: Coded) -> None:
        if self.times_ms is not None:
            self.now_ms += coded.coding_ms
            self.coding_ms += coded.coding_ms

    def _is_known_done(self, number: int) -> bool:
        """Say whether the host knows that the copy of a slot has left."""
        return self.lanes.is_done(self.offloads[number], self.host.seen_ms(self.now_ms))

    def _release_done(self) -> None:
        waiting = self.windows.waiting
        while waiting and self._is_known_done(self.windows.oldest):
            self._release(self.windows.oldest)

    def _release_all(self, numbers: Sequence[int]) -> None:
        """Wait for the newest of some copies, which stands for all, and let their payloads go."""
        if numbers:
            self._wait(max((self.offloads[each] for each in numbers), key=lambda copy: copy.order))
        for number in numbers:
            self._release(number)

    def _release(self, number: int) -> None:
        self.windows.remove(number)
        if number in self.coded:
            self._deallocate((PAYLOAD, number))
        else:
            self._let_go(self.program.slots[number])

    def _layer_end(self) -> None:
        if self.windows.limit_bytes is not None:
            self._release_done()
        else:
            self._release_all(list(self.windows.waiting))

    def _send_gradients(self) -> None:
        self.lanes.book(Copy(GRADIENT, self.gradient_bytes, self.now_ms))

    def _wait(self, copy: Copy) -> None:
        until_ms = self.lanes.wait(copy, self.now_ms)
        if until_ms > self.now_ms:
            self.stalls.append(Stall(self.phase, copy.slot, self.now_ms, until_ms))
        self.stall_ms[self.phase] += until_ms - self.now_ms
        self.now_ms = until_ms

    # ---- backward ------------------------------------------------------------------------------

    def _backward_start(self, layer: int) -> None:
        if self.windows.limit_bytes is None:
            for number in self.by_layer.get(layer, ()):
                copy = self.reloads.get(number)
                if copy is not None and not self.is_over[number]:
                    self._wait(copy)
        self.windows.start(layer)
        self._prefetch()

    def _prefetch(self) -> None:
        windows = self.windows
        while (number := windows.next_slot(self._is_on_host)) is not None:
            meant, suffices = windows.make_room(windows.lacking_bytes)
            self._release_all(meant)
            if not suffices:
                return
            self._reload(number)

    def _is_on_host(self, number: int) -> bool:
        return not (
            number in self.reloads
            or number not in self.offloads
            or self.is_over[number]
            or number in self.windows.waiting
        )

    def _reload(self, number: int) -> None:
        offload = self.offloads[number]
        copied_bytes = self._link_bytes(number)
        copy = Copy(RELOAD, copied_bytes, self.now_ms, needs=offload, slot=number)
        self.reloads[number] = copy
        self._allocate((ENCODED if number in self.coded else RELOADED, number), copied_bytes)
        self.reloaded_at[number] = self.number
        self.lanes.book(copy)
        self.windows.ahead_bytes += copied_bytes

    def _unpack(self, number: int) -> None:
        slot = self.program.slots[number]
        if slot.link_bytes == 0:
            self._prefetch()  # it was rebuilt
            return
        if number in self.rebuilds:
            self._rebuild(number, self.rebuilds[number])
            return
        if not self.leaves[number] or number in self.is_consumed:
            return
        if number in self.windows.waiting:
            if not self.is_read_in_place[number]:
                if not self._decoded(number):
                    self._hold(slot)
                self.is_read_in_place[number] = True
                self.read_in_place_bytes += slot.link_bytes
            if not self.windows.is_exhausted:
                self._prefetch()
            return
        if number not in self.reloads:
            self._reload(number)
        self._wait(self.reloads[number])
        if self._decoded(number):
            self._deallocate((ENCODED, number))
        self.is_consumed.add(number)
        self.windows.ahead_bytes -= self._link_bytes(number)
        if not self.windows.is_exhausted:
            self._prefetch()

    def _decoded(self, number: int) -> bool:
        """Decode a slot, if it was encoded; say whether it was."""
        coded = self.coded.get(number)
        if coded is None:
            return False
        self._run_codec(coded)
        self._allocate((RELOADED, number), self.program.slots[number].link_bytes)
        return True

    def _rebuild(self, number: int, rebuild: Rebuild) -> None:
        if number not in self.is_rebuilt:
            self.is_rebuilt.add(number)
            for again in rebuild.operations:
                for buffer in again.makes:
                    self._allocate((BUFFER, buffer), self.program.buffers[buffer].nbytes)
                    self.rebuilt_at[buffer] = self.number
                workspace_bytes = self.program.operations[again.operation].workspace_bytes
                if inside_bytes := again.beside_bytes + workspace_bytes:
                    self._allocate((WORKSPACE, number), inside_bytes)
                    self._deallocate((WORKSPACE, number))
                for buffer in again.frees:
                    self._free_rebuilt(buffer)
            if self.times_ms is not None:
                self.now_ms += rebuild.elapsed_ms
                self.rebuild_ms += rebuild.elapsed_ms
        self._prefetch()

    def _free_rebuilt(self, buffer: int) -> None:
        """Free a buffer that was rebuilt, unless that was done when an operation had read it."""
        birth = self.rebuilt_at.pop(buffer, None)
        if birth is not None:
            self._deallocate((BUFFER, buffer))
            self.lifetimes.append(Lifetime(buffer, birth, self.number))

    def _slot_ends(self, number: int) -> None:
        """Backward is done with a slot."""
        slot = self.program.slots[number]
        self.is_over[number] = True
        self.windows.ends(number)
        if number in self.rebuilds:
            return
        if not self.leaves[number]:
            self._let_go(slot)
            return
        self.host_bytes -= _in_pool(self._link_bytes(number))
        if number in self.reloads:
            is_encoded = number in self.coded and number not in self.is_consumed
            self._deallocate((ENCODED if is_encoded else RELOADED, number))
            start = self.reloaded_at[number]
            self.lifetimes.append(Lifetime(slot.reloaded, start, self.number))
        if self.is_read_in_place[number]:
            if number in self.coded:
                self._deallocate((RELOADED, number))
            else:
                self._let_go(slot)


def _in_pool(nbytes: int) -> int:
    """Return what a buffer takes of the host pool."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
