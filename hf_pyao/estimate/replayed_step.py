"""Replays a recorded step on the simulation's clock, without tensors.

The engine's own windows decide when what leaves and comes back; the simulation's link says when
copies run, also where both directions share an engine or the host's memory. The step is numbers, so
that a replay takes a tenth of a second: it judges predictions where hundreds of points are tried.
``simulated_step`` runs the engine itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_pyao.estimate.simulated_step import SimulatedStep
from hf_pyao.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.hardware.speeds import LinkModel
from hf_pyao.planning.prediction import Rebuild
from hf_pyao.planning.step_program import BACKWARD, FORWARD, OUTSIDE, SlotUse, StepProgram
from hf_pyao.simulation.virtual_link import Booking, VirtualLink
from hf_pyao.transfer.compute_streams import ComputeStreams
from hf_pyao.transfer.moved_bytes import DEVICE, HOST, OFFLOADING, RELOADING, Residency
from hf_pyao.transfer.window import OffloadWindow, ReloadWindow


def replay_step(
    program: StepProgram,
    leaves: Sequence[bool],
    *,
    times_ms: Sequence[float],
    link: LinkModel,
    window_bytes: int | None,
    rebuilds: Mapping[int, Rebuild] | None = None,
    gradient_bytes: int = 0,
    host: HostModel = FAR_AHEAD,
) -> SimulatedStep:
    """Replay a step.

    Args:
        program: the step, whole.
        leaves: for each slot, whether it is offloaded; what stays, stays.
        times_ms: what each operation takes.
        link: speeds of copies.
        window_bytes: as ``PyAOConfig.window``; None: ``"layer"``.
        rebuilds: what it takes to rebuild slots that are dropped, by number.
        gradient_bytes: what leaves for the host beside whenever a layer's backward ends.
        host: how far the host runs ahead of the device.
    """
    virtual_link = VirtualLink(link, host=host)
    replay = _Replay(program, leaves, times_ms, virtual_link, window_bytes, rebuilds or {})
    replay.gradient_bytes = gradient_bytes
    return replay.run()


@dataclass(eq=False)
class _Ticket:
    """A copy on the virtual link."""

    booking: Booking
    order: int
    queue: str = "offload"
    compute: None = None


class _Clock:
    """What windows ask of a transport."""

    def __init__(self, link: VirtualLink) -> None:
        self._link = link

    def is_done(self, ticket: _Ticket) -> bool:
        return self._link.is_done(ticket.booking)

    def wait(self, ticket: _Ticket) -> None:
        self._link.wait(ticket.booking)


class _Payload:
    """Stands for a device copy that waits to leave."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go

    def __del__(self) -> None:
        """Let go of the memory: neither the bytes nor the window hold it any more."""
        self._let_go()


class _Bytes:
    """Stands for moved bytes that there are not; it has what windows ask of them."""

    codec = None
    home = None
    is_consumed = False
    is_read_in_place = False
    aim: object = None

    def __init__(self, slot: SlotUse, ticket: _Ticket, payload: _Payload) -> None:
        self.slot = slot
        self.offload_ticket = ticket
        self.reload_ticket: _Ticket | None = None
        self.device_bytes = slot.link_bytes
        self.payload: tuple[_Payload, ...] = (payload,)
        self.residency: Residency = OFFLOADING

    def is_aimed_at(self, aim: object) -> None:
        """Note that it is to be read in place."""
        self.aim = aim

    @property
    def moved(self) -> _Bytes:
        """Itself: it stands for what holds the bytes, too."""
        return self

    def source_has_left(self) -> None:
        """Let go of the device copy."""
        self.residency = HOST
        self.payload = ()

    def consumed(self) -> None:
        """Note that it no longer counts as ahead."""
        self.is_consumed = True


class _Replay:
    def __init__(
        self,
        program: StepProgram,
        leaves: Sequence[bool],
        times_ms: Sequence[float],
        link: VirtualLink,
        window_bytes: int | None,
        rebuilds: Mapping[int, Rebuild],
    ) -> None:
        self.program = program
        self.rebuilds = rebuilds
        self.gradient_bytes = 0
        self.is_rebuilt: set[int] = set()
        self.rebuilt_buffers: set[int] = set()
        """Buffers that were rebuilt and are there."""
        self.leaves = leaves
        self.times_ms = times_ms
        self.link = link
        self.meets_at_layer_end = window_bytes is None
        clock: Any = _Clock(link)
        self.offloads = OffloadWindow(clock, window_bytes, ComputeStreams())
        self.reloads = ReloadWindow(window_bytes)
        self.by_layer: defaultdict[int, dict[int, _Bytes]] = defaultdict(dict)
        self.orders = itertools.count()
        self.holders: defaultdict[int, int] = defaultdict(int)
        """What holds a buffer beside the operations: saved tensors, and copies under way."""
        self.is_dead: set[int] = set()
        self.live_bytes = self.peak_bytes = program.resident_bytes
        self.offloaded_bytes = 0
        self.events: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        """What happens before each operation."""
        self.after: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        """What ends with each operation: first what dies, then what is made."""
        self._arrange()

    def _arrange(self) -> None:
        program = self.program
        moves = [
            leaving and slot.link_bytes > 0 and number not in self.rebuilds
            for number, (leaving, slot) in enumerate(zip(self.leaves, program.slots, strict=True))
        ]
        moved: dict[int, _Bytes] = {}
        starts = {(each.layer, each.start) for each in program.segments if each.phase == FORWARD}
        # Before an operation: what the layer before saved last, layers' ends and starts, what the
        # layer saves first, what backward asks for.
        first: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        for number, slot in enumerate(program.slots):
            if slot.link_bytes == 0 or (not moves[number] and slot.reloaded < 0):
                continue
            if number in self.rebuilds:
                continue
            pack = partial(self._pack, number, moves[number], moved)
            is_first = (slot.layer, slot.left_at) in starts
            (first if is_first else self.events)[slot.left_at].append(pack)
        before = None
        for segment in program.segments:
            events = self.events[segment.start]
            if before is not None and before.layer != OUTSIDE and before.phase == FORWARD:
                events.append(self.offloads.layer_end)
            if before is not None and before.layer != OUTSIDE and before.phase == BACKWARD:
                events.append(self._send_gradients)
            if segment.phase == BACKWARD and segment.layer != OUTSIDE:
                events.append(partial(self._backward_start, segment.layer))
            before = segment
        for moment, packs in first.items():
            self.events[moment] += packs
        asked = sorted(
            (moment, slot.unpack_rank, number)
            for number, slot in enumerate(program.slots)
            if ((moves[number] or number in self.rebuilds) and slot.reloaded >= 0)
            or slot.link_bytes == 0
            for moment in (slot.unpacked_at, *slot.asked_again)
            if moment >= 0
        )
        for moment, _, number in asked:
            is_rebuilt = program.slots[number].link_bytes == 0
            event = self._prefetch if is_rebuilt else partial(self._unpack, number, moved)
            if number in self.rebuilds:
                event = partial(self._rebuild, number)
            self.events[moment].append(event)
        reloaded = {slot.reloaded for slot in program.slots if slot.reloaded >= 0}
        for rebuild in self.rebuilds.values():
            for buffer_number in (made for each in rebuild.operations for made in each.makes):
                reloaded.add(buffer_number)
                end = program.buffers[buffer_number].death
                self.after[end].append(partial(self._free_rebuilt, buffer_number))
        for number, buffer in enumerate(program.buffers):
            if number not in reloaded:
                self.after[buffer.death].append(partial(self._die, number))
        for number, slot in enumerate(program.slots):
            if slot.reloaded >= 0 and slot.link_bytes:
                end = program.buffers[slot.reloaded].death
                self.after[end].append(partial(self._slot_ends, number, moves[number], moved))
        for number, buffer in enumerate(program.buffers):
            if number not in reloaded:
                self.after[buffer.birth].append(partial(self._make, buffer.nbytes))

    def run(self) -> SimulatedStep:
        """Run the step."""
        for number in range(self.program.num_operations):
            for event in self.events[number]:
                event()
            if self.times_ms[number]:
                self.link.advance(self.times_ms[number])
            for event in self.after[number]:
                event()
            inside_bytes = self.program.operations[number].workspace_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside_bytes)
        for event in self.events[self.program.num_operations]:
            event()
        self.offloads.drain()  # as the engine does when backward ends
        return SimulatedStep(
            self.link.compute_ms, self.link.stall_ms, self.peak_bytes, self.offloaded_bytes
        )

    # ---- memory --------------------------------------------------------------------------------

    def _make(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _die(self, buffer: int) -> None:
        self.is_dead.add(buffer)
        if not self.holders[buffer]:
            self.live_bytes -= self.program.buffers[buffer].nbytes

    def _hold(self, buffer: int) -> None:
        self.holders[buffer] += 1

    def _let_go(self, buffer: int) -> None:
        if buffer < 0:
            return
        self.holders[buffer] -= 1
        if buffer in self.is_dead and not self.holders[buffer]:
            self.live_bytes -= self.program.buffers[buffer].nbytes

    # ---- what the engine does ------------------------------------------------------------------

    def _pack(self, number: int, leaves: bool, moved: dict[int, _Bytes]) -> None:
        slot = self.program.slots[number]
        if slot.source >= 0:
            self._hold(slot.source)
        if not leaves:
            return
        ticket = _Ticket(self.link.book("offload", slot.link_bytes), next(self.orders))
        payload = _Payload(partial(self._let_go, slot.source))
        moved[number] = _Bytes(slot, ticket, payload)
        self.by_layer[slot.layer][number] = moved[number]
        self.offloaded_bytes += slot.link_bytes
        window: Any = self.offloads
        window.add(moved[number])

    def _backward_start(self, layer: int) -> None:
        if self.meets_at_layer_end:
            for each in self._group(layer):
                if each.residency is RELOADING:
                    self._wait(each)
        own = [weakref.ref(each) for each in self._group(layer)]
        others = ([weakref.ref(b) for b in self._group(n)] for n in range(layer - 1, -1, -1))
        self.reloads.start(own, others)
        self._prefetch()

    def _group(self, layer: int) -> list[_Bytes]:
        """Return what a layer call moved, in the order in which it was saved."""
        return [moved for _, moved in sorted(self.by_layer[layer].items())]

    def _prefetch(self) -> None:
        reloads: Any = self.reloads
        while (moved := reloads.next_bytes()) is not None:
            lacking_bytes = reloads.lacks_bytes(self.offloads.waiting_bytes)
            if self.offloads.make_room(lacking_bytes, reloads.aim) < lacking_bytes:
                return
            self._reload(moved)

    def _reload(self, moved: _Bytes) -> None:
        self._make(moved.device_bytes)
        moved.residency = RELOADING
        booking = self.link.book("reload", moved.device_bytes, [moved.offload_ticket.booking])
        moved.reload_ticket = _Ticket(booking, next(self.orders), "reload")
        reloads: Any = self.reloads
        reloads.loaded(moved)

    def _wait(self, moved: _Bytes) -> None:
        assert moved.reload_ticket is not None
        self.link.wait(moved.reload_ticket.booking)
        moved.residency = DEVICE

    def _unpack(self, number: int, all_moved: dict[int, _Bytes]) -> None:
        moved = all_moved[number]
        if moved.residency is OFFLOADING:
            if not moved.is_read_in_place and moved.slot.source >= 0:
                self._hold(moved.slot.source)
            moved.is_read_in_place = True
            if not self.reloads.is_exhausted:
                self._prefetch()
            return
        if moved.is_consumed:
            return
        if moved.residency is HOST:
            self._reload(moved)
        if moved.residency is RELOADING:
            self._wait(moved)
        reloads: Any = self.reloads
        reloads.consumed(moved)
        if not self.reloads.is_exhausted:
            self._prefetch()

    def _rebuild(self, number: int) -> None:
        """Run again what makes a dropped slot, when it is asked for first."""
        if number not in self.is_rebuilt:
            self.is_rebuilt.add(number)
            rebuild = self.rebuilds[number]
            for again in rebuild.operations:
                for buffer in again.makes:
                    self._make(self.program.buffers[buffer].nbytes)
                self.rebuilt_buffers.update(again.makes)
                self.peak_bytes = max(self.peak_bytes, self.live_bytes + again.beside_bytes)
                for buffer in again.frees:
                    self._free_rebuilt(buffer)
            if rebuild.elapsed_ms:
                self.link.advance(rebuild.elapsed_ms)
        self._prefetch()

    def _free_rebuilt(self, buffer: int) -> None:
        if buffer in self.rebuilt_buffers:
            self.rebuilt_buffers.remove(buffer)
            self.live_bytes -= self.program.buffers[buffer].nbytes

    def _send_gradients(self) -> None:
        if self.gradient_bytes:
            self.link.book("gradient", self.gradient_bytes)

    def _slot_ends(self, number: int, leaves: bool, all_moved: dict[int, _Bytes]) -> None:
        slot = self.program.slots[number]
        if number in self.rebuilds:
            return
        if not leaves:
            if slot.source >= 0:
                self._let_go(slot.source)
            return
        # The windows hold weak references: nothing else may hold what is over.
        moved = all_moved.pop(number)
        del self.by_layer[slot.layer][number]
        if moved.reload_ticket is not None:
            self.live_bytes -= moved.device_bytes
        if moved.is_read_in_place and slot.source >= 0:
            self._let_go(slot.source)
