"""Predicts a step under a plan: time, stalls, and the peak on device and host, with what sets it.

Arithmetic on a :class:`~hf_pyao.plan.step.step_program.StepProgram`. It walks through the
operations once and does with each slot what the engine would do: queue its copy, hold its memory
until the copy is done, bring it back as the window allows. The engine's own schedule decides when
(``predicted_copies``). No tensor is made. The simulation, which judges the prediction, runs the
engine itself.

A step of twenty layers takes some tens of milliseconds to predict.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import add

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.predict.copy_lanes import GRADIENT, Copy, Lanes, LateLanes, TimedLanes
from hf_pyao.plan.predict.disk_demand import DiskDemand
from hf_pyao.plan.predict.kept_slots import KeptSlots
from hf_pyao.plan.predict.predicted_copies import PredictedOffloads, PredictedReloads
from hf_pyao.plan.predict.predicted_disk import PredictedDisk
from hf_pyao.plan.predict.predicted_memory import PredictedMemory
from hf_pyao.plan.predict.predicted_rebuilds import PredictedRebuilds
from hf_pyao.plan.predict.predicted_uploads import PredictedUploads
from hf_pyao.plan.predict.step_clock import LanesClock, StepClock
from hf_pyao.plan.step.collectives import with_collectives
from hf_pyao.plan.step.prediction import (
    Coded,
    PredictedCopy,
    Prediction,
    Rebuild,
)
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram


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
    host_ms: Sequence[float] = (),
    is_first_step: bool = False,
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
        host_ms: what each segment of the step takes the host; empty: it keeps nothing waiting.
        is_first_step: no streamed weights are on the device when the step begins.

    Raises:
        ConfigError: *leaves* is not as long as the program's slots, or *times_ms* not as its
            operations.
    """
    if times_ms is None and device is not None:
        times_ms = operation_times_ms(program, device)
    plan = StepPlan(leaves, window_bytes, rebuilds or {}, gradient_bytes, coded or {}, host_ms)
    lanes: Lanes = LateLanes() if link is None else TimedLanes(link)
    clock = LanesClock(lanes, host, is_timed=times_ms is not None)
    disk, slower = None, None
    below = None if link is None or times_ms is None else link.disk
    if below is not None and below.takes_saved:
        demand = DiskDemand.of(program, leaving_bytes(program, plan), below)
        seen, slower = demand.slower(below)
        disk = PredictedDisk(seen, clock)
    walk = StepWalk(
        program, plan, times_ms, clock, disk, is_first_step=is_first_step, slower=slower
    )
    prediction = replace(
        walk.run(),
        stall_forward_ms=clock.stall_ms[FORWARD],
        stall_backward_ms=clock.stall_ms[BACKWARD],
        collective_forward_ms=clock.collective_wait_ms[FORWARD],
        collective_backward_ms=clock.collective_wait_ms[BACKWARD],
    )
    if times_ms is None or link is None:
        return prediction
    clock.finish()
    return replace(prediction, copies=walk.copies(), stalls=tuple(clock.stalls))


def operation_times_ms(program: StepProgram, device: DeviceModel) -> list[float]:
    """Return what each operation of *program* takes on *device*; 0 for what runs no kernel.

    Collectives take what they take beside compute.
    """
    times_ms = [
        device.op_ms(operation.flops, operation.traffic_bytes) * operation.num_runs
        if operation.is_kernel
        else 0.0
        for operation in program.operations
    ]
    return with_collectives(times_ms, program.operations, device.collective_gib_per_s)


@dataclass(frozen=True)
class StepPlan:
    """A plan for the slots of a step; fields as the arguments of :func:`predict`."""

    leaves: Sequence[bool]
    window_bytes: int | None
    rebuilds: Mapping[int, Rebuild]
    gradient_bytes: int
    coded: Mapping[int, Coded]
    host_ms: Sequence[float] = ()


def leaving_slots(program: StepProgram, plan: StepPlan) -> list[bool]:
    """Return which slots of *program* leave the device under *plan*."""
    return [
        leaves and slot.link_bytes > 0 and number not in plan.rebuilds
        for number, (slot, leaves) in enumerate(zip(program.slots, plan.leaves, strict=False))
    ]


def leaving_bytes(program: StepProgram, plan: StepPlan) -> int:
    """Return the bytes of the slots that leave, encoded where they are."""
    coded = plan.coded
    return sum(
        coded[number].nbytes if number in coded else program.slots[number].link_bytes
        for number, leaves in enumerate(leaving_slots(program, plan))
        if leaves
    )


class StepWalk:
    """One walk through a program, on a clock.

    Args:
        program: the step.
        plan: what becomes of its slots.
        times_ms: what each operation takes; None: no times are predicted.
        clock: says when copies are done.
        disk: where slots go that find no room on the host; None: the host has room for all.
        is_first_step: as for :func:`predict`.
        slower: as for :class:`~hf_pyao.plan.predict.predicted_uploads.PredictedUploads`.

    Raises:
        ConfigError: the plan has not as many entries as the program has slots, or *times_ms* not as
            many as it has operations.
    """

    def __init__(
        self,
        program: StepProgram,
        plan: StepPlan,
        times_ms: Sequence[float] | None,
        clock: StepClock,
        disk: PredictedDisk | None = None,
        *,
        is_first_step: bool = False,
        slower: Mapping[str, float] | None = None,
    ) -> None:
        slots = program.slots
        if len(plan.leaves) != len(slots):
            raise ConfigError(
                f"leaves has {len(plan.leaves)} entries; the program has {len(slots)}",
                key="wrong-argument",
            )
        if times_ms is not None and len(times_ms) != program.num_operations:
            raise ConfigError(
                f"times_ms has {len(times_ms)} entries; the program has {program.num_operations}",
                key="wrong-argument",
            )
        self._program = program
        self._plan = plan
        self._times_ms = times_ms
        self._clock = clock
        self._host_ends_ms = tuple(accumulate(plan.host_ms))
        """When the host has queued each segment."""
        self._host_wait_ms = {FORWARD: 0.0, BACKWARD: 0.0}
        self._made_again = {slot.reloaded for slot in slots if slot.reloaded >= 0}
        """Buffers that are not there just from birth to death: reloaded ones, and rebuilt ones."""
        for rebuild in plan.rebuilds.values():
            self._made_again.update(made for each in rebuild.operations for made in each.makes)
        self._leaves = leaving_slots(program, plan)
        self._kept = kept = KeptSlots(program, self._leaves, plan.rebuilds, self._made_again)
        self._memory = memory = PredictedMemory(
            program, self._made_again, kept.held, kept.last.values()
        )
        by_layer: defaultdict[int, list[int]] = defaultdict(list)
        for number in reversed(range(len(slots))):  # backward asks for the newest first
            if self._leaves[number]:
                by_layer[slots[number].layer].append(number)
        self._offloads = PredictedOffloads(
            plan.window_bytes, program, plan.coded, clock, memory, disk
        )
        self._reloads = PredictedReloads(self._offloads, program, by_layer, clock, memory)
        self._uploads = PredictedUploads(program, clock, is_first_step=is_first_step, slower=slower)
        self._ends_early = {
            number
            for number, slot in enumerate(slots)
            if self._leaves[number]
            and slot.reloaded >= 0
            and max(slot.unpacked_at, *slot.asked_again, -1)
            < program.buffers[slot.reloaded].death
            < program.num_operations
        }
        timed = None if times_ms is None else clock
        self._rebuilds = PredictedRebuilds(
            program, plan.rebuilds, self._leaves, timed, memory, self._reloads, self._uploads
        )

    # ---- what happens when ---------------------------------------------------------------------

    def _events_before(self) -> _Events:
        """Return what happens before each operation, in order.

        That is the end of slots that were asked for before (autograd lets go of what an operation's
        backward has saved before it goes on), what the layer before saves last, the ends and starts
        of layers, what the layer saves before its first operation, and what backward asks for.
        """
        events: _Events = defaultdict(list)
        for number in self._ends_early:
            reloaded = self._program.slots[number].reloaded
            events[self._program.buffers[reloaded].death].append((self._slot_ends, number))
        pack, unpack, enter = self._pack, self._unpack, self._enter
        first_packs: list[tuple[int, int]] = []
        asked: list[tuple[int, int, int]] = []
        program, kept = self._program, self._kept.slots
        none_leaves = not any(self._leaves)
        begun = {(each.layer, each.start) for each in program.segments if each.phase == FORWARD}
        for number, slot in enumerate(program.slots):
            if number in kept:
                continue
            if slot.link_bytes == 0:
                if not none_leaves:  # else there is nothing to bring back
                    asked += ((moment, slot.unpack_rank, number) for moment in slot.asked_again)
                continue
            if (slot.layer, slot.left_at) in begun:
                first_packs.append((slot.left_at, number))
            else:
                events[slot.left_at].append((pack, number))
            if slot.reloaded >= 0:
                moments = (slot.unpacked_at, *slot.asked_again)
                if number in self._rebuilds.read_first:
                    moments = slot.asked_again
                asked += ((moment, slot.unpack_rank, number) for moment in moments)
        for number, segment in enumerate(program.segments):
            events[segment.start].append((enter, number))
        for moment, number in first_packs:
            events[moment].append((pack, number))
        for moment, _, number in sorted(asked):
            events[moment].append((unpack, number))
        return events

    def _ends(self) -> _Events:
        """Return what ends with each operation, besides what was there from birth to death."""
        events: _Events = defaultdict(list)
        buffers, kept = self._program.buffers, self._kept
        end, free, let_go = self._slot_ends, self._rebuilds.free, self._memory.die
        for number, slot in enumerate(self._program.slots):
            if number in kept.last:
                events[buffers[slot.reloaded].death].append((let_go, kept.last[number]))
            elif number in self._ends_early:
                continue
            elif slot.link_bytes and slot.reloaded >= 0 and number not in kept.slots:
                events[buffers[slot.reloaded].death].append((end, number))
        for rebuild in self._plan.rebuilds.values():
            for number in (made for each in rebuild.operations for made in each.makes):
                events[buffers[number].death].append((free, number))
        # Buffers of kept slots alone go as those whose operations are over.
        for moment in [m for m, found in events.items() if all(e is let_go for e, _ in found)]:
            for rank, (_, buffer) in enumerate(events.pop(moment)):
                self._memory.end_with(moment, rank, buffer)
        return events

    def run(self) -> Prediction:
        """Walk; waits are counted by the clock."""
        program, memory, clock, times_ms = self._program, self._memory, self._clock, self._times_ms
        operations, num_operations = program.operations, program.num_operations
        before, ends, read_by = self._events_before(), self._ends(), self._uploads.read_by
        stops = {number for number, each in enumerate(operations) if each.collective or each.awaits}
        stops.update(before, ends, read_by)
        start_ms: list[float] = []
        compute_ms = 0.0
        done = 0
        for number in sorted(stops):
            if number >= num_operations:
                break
            if done < number and times_ms is not None:
                elapsed = times_ms[done:number]
                start_ms += clock.run_kernels(elapsed)
                compute_ms = reduce(add, elapsed, compute_ms)
            done = number + 1
            memory.begin(number)
            for event, subject in before.get(number, ()):
                event(subject)
            operation = operations[number]
            elapsed_ms = 0.0 if times_ms is None else times_ms[number]
            if operation.awaits:
                clock.await_collective(operation.awaits)
            if operation.collective is not None:
                clock.queue_collective(elapsed_ms, is_gather=operation.collective.is_gather)
                elapsed_ms = 0.0  # of compute
            if number in read_by:
                started_ms = self._run_by_block(read_by[number], elapsed_ms)
            else:
                started_ms = clock.run_kernel(elapsed_ms) if elapsed_ms else clock.now_ms
            if times_ms is not None:
                start_ms.append(started_ms)
                compute_ms += elapsed_ms
            if number in ends:
                memory.end(number)
                for event, subject in ends[number]:
                    event(subject)
        if done < num_operations and times_ms is not None:
            elapsed = times_ms[done:]
            start_ms += clock.run_kernels(elapsed)
            compute_ms = reduce(add, elapsed, compute_ms)
        memory.begin(num_operations)
        for event, subject in before.get(num_operations, ()):
            event(subject)
        self._await_host(len(program.segments) - 1)
        clock.await_collective(0)
        self._offloads.release(list(self._offloads.waiting))  # as the engine when backward ends
        trace = memory.finish()
        compute_ms = compute_ms + self._rebuilds.elapsed_ms + self._offloads.coding_ms
        return Prediction(
            step_ms=math.nan if times_ms is None else clock.now_ms,
            compute_ms=math.nan if times_ms is None else compute_ms,
            stall_forward_ms=math.nan,
            stall_backward_ms=math.nan,
            host_forward_ms=self._host_wait_ms[FORWARD],
            host_backward_ms=self._host_wait_ms[BACKWARD],
            peak_bytes=trace.peak_bytes,
            peak_at=trace.peak_at,
            host_peak_bytes=self._offloads.host_peak_bytes,
            offloaded_bytes=self._offloads.offloaded_bytes,
            read_in_place_bytes=self._reloads.read_in_place_bytes,
            uploaded_bytes=self._uploads.uploaded_bytes,
            num_uploads=len(self._uploads.copies),
            trace=trace,
            start_ms=tuple(start_ms),
        )

    def copies(self) -> tuple[PredictedCopy, ...]:
        """Return the copies of slots, by start."""
        slots = [*self._offloads.copies.values(), *self._reloads.copies.values()]
        copies = [*slots, *self._uploads.copies]
        found = [PredictedCopy(c.direction, c.slot, c.start_ms, c.end_ms, c.layer) for c in copies]
        return tuple(sorted(found, key=lambda copy: (copy.start_ms, copy.slot)))

    # ---- what happens --------------------------------------------------------------------------

    def _run_by_block(self, blocks: Sequence[int], elapsed_ms: float) -> float:
        """Run an operation that reads several blocks of weights; return when it starts.

        Groups of experts are computed one after the other, each as its weights are there.
        """
        starts_ms = []
        for block in blocks:
            self._uploads.read(block)
            part_ms = elapsed_ms / len(blocks)
            starts_ms.append(self._clock.run_kernel(part_ms) if part_ms else self._clock.now_ms)
        return starts_ms[0]

    def _enter(self, number: int) -> None:
        """End one segment, and begin the next."""
        segment = self._program.segments[number]
        before = self._program.segments[number - 1] if number else segment
        self._await_host(number - 1)
        if number and before.layer != OUTSIDE:
            if before.phase == FORWARD:
                self._offloads.layer_end()
            elif self._plan.gradient_bytes:
                self._clock.book(Copy(GRADIENT, self._plan.gradient_bytes, self._clock.now_ms))
        self._clock.enter(segment.phase)
        self._uploads.enter(segment)
        if segment.phase == BACKWARD and segment.layer != OUTSIDE:
            # What the layer itself asks for comes before the weights of the next one.
            self._reloads.start_layer(segment.layer, self._uploads.ahead)
        self._uploads.ahead()
        self._uploads.wait()

    def _await_host(self, number: int) -> None:
        """End a segment: the device cannot be through with it before the host is."""
        if self._host_ends_ms and number >= 0:
            wait_ms = max(0.0, self._host_ends_ms[number] - self._clock.now_ms)
            self._clock.advance(wait_ms)
            self._host_wait_ms[self._clock.phase] += wait_ms

    def _pack(self, number: int) -> None:
        slot = self._program.slots[number]
        if self._leaves[number]:
            self._offloads.offload(number)
        elif slot.reloaded >= 0 and number not in self._plan.rebuilds:
            self._memory.hold(slot.source)

    def _unpack(self, number: int) -> None:
        slot = self._program.slots[number]
        if slot.link_bytes == 0:
            self._reloads.prefetch()  # it was rebuilt
        elif number in self._plan.rebuilds:
            self._rebuilds.use(number)
        elif self._leaves[number]:
            self._reloads.use(number, is_read=slot.is_read_first)

    def _slot_ends(self, number: int) -> None:
        """Backward is done with a slot."""
        if self._leaves[number]:
            self._reloads.end(number)
        elif number not in self._plan.rebuilds:
            self._memory.let_go(self._program.slots[number].source)


_Events = defaultdict[int, list[tuple[Callable[[int], None], int]]]
"""By number of operation: what happens, and to which slot, buffer or segment."""
