"""Weights that visit the device: a ring of blocks whose updates go back to the host.

[Note: Visits]
- A block is uploaded ahead of its layer (``transfer/ring_schedule.py``). As the layer begins, its
  trained weights are updated in the slot by the steps that they have not seen, and the copy back to
  the host is queued at once: both passes only read, so that copy runs beside them.
- What a module reads is a new tensor: the weight in the slot plus or minus epsilon times the noise.
  The slot keeps the pristine bits.
- An upload into the slot waits for the copy back from it, and an upload of the block waits for the
  block's own copy back. A block that has stayed in its slot is updated there behind its last copy
  back. All are event waits.
- The number of steps that a weight has seen is raised once the copy back is queued. If anything
  fails before that, the slot is forgotten, the host has the bits of before, and the update is made
  at the next visit.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_pyao.engine.transfer.compute_streams import is_held_elsewhere
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule
from hf_pyao.engine.weights.blocks import Weight, weights_by_parameter
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.host_weight import HostWeight
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.by_rows import ReadsByRows
from hf_pyao.engine.zeroth_order.device_slots import DeviceSlot, DeviceSlots
from hf_pyao.engine.zeroth_order.perturbation import Draw
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeights
from hf_pyao.errors import ConflictError


class _Pass(threading.local):
    """State of the calling thread."""

    sign: int | None = None
    """1 and -1 in a pass of a step, 0 in another forward; None outside of a forward."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, str], torch.Tensor] = {}
        """What this layer call has read, by the parameter's id and the place."""
        self.lent: list[tuple[Weight, torch.Tensor, int]] = []
        """Unperturbed weights among them, with their versions: nobody may write into these."""

    def let_go(self) -> Weight | None:
        """Forget what was read; return a weight that was written into outside of a pass."""
        lent, self.lent = self.lent, []
        self.given.clear()
        return next((weight for weight, view, before in lent if view._version != before), None)


class WeightVisits(RingSchedule):
    """Trained and frozen weights as the modules of one model read them.

    Args:
        blocks: those on the host, in forward order, with their memory.
        trained: all trained weights of the model.
        link: transport and host memory.
        device: where compute runs.
        num_slots: slots of the ring.
        hand_over: called between two pieces of a weight that is read by rows.
        read_later: by ``id``, embeddings' weights that the head reads at the end of the forward.
    """

    def __init__(
        self,
        blocks: Sequence[VisitBlock],
        trained: TrainedWeights,
        link: LinkContext,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
        hand_over: Callable[[], None] = lambda: None,
        read_later: Collection[int] = frozenset(),
    ) -> None:
        super().__init__(len(blocks), num_slots)
        self.device = device
        self.trained = trained
        self.blocks = tuple(blocks)
        self.counts = UploadFigures()
        self.num_offloads = 0
        """Copies of blocks back to the host."""
        self.offloaded_bytes = 0
        """Bytes that they copied."""
        self.link = link
        self._hand_over = hand_over
        self.read_later = read_later
        self._transport = link.transport
        self._slots = DeviceSlots(blocks, num_slots, link, device, self.counts)
        self._weights = weights_by_parameter(blocks)
        self._stand_ins: dict[int, HostWeight] = {}
        self.by_rows = ReadsByRows(weakref.proxy(self))
        """Computes with weights that are read by rows."""
        self._copies_back: dict[int, list[Any]] = {}
        """By block, the tickets of its newest copy back."""
        self._left_by: list[int | None] = [None] * num_slots
        """By slot, the block whose copy back may still read it."""
        self._seen = [-1] * len(blocks)
        """By block, how many steps its weights have seen."""
        self._pass = _Pass()
        self.lock: Any = threading.RLock()
        """Held while blocks move."""
        self.in_use = threading.RLock()
        """Held by the thread that runs a step, or another forward."""

    # ---- what modules read: a Source of tables -------------------------------------------------

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is on the host."""
        return self.weight_of(parameter) is not None

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is streamed of *parameter*; None if nothing is."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is one that a pass has read: no parameter of the model."""
        if any(tensor is each for each in self._pass.given.values()):
            return True
        return self._slots.of_storage(tensor.untyped_storage()._cdata) is not None

    def read(self, parameter: Any, module: str = "") -> Any:
        """Return what a module's attribute gives where *parameter* is in its table.

        In a pass the perturbed weight, in another forward the weight, on the device. Elsewhere the
        parameter. *module*: which reads it, where the noise depends on that.
        """
        here = self._pass
        if here.sign is None or parameter is None:
            return parameter
        given = here.given.get((id(parameter), module))
        if given is not None:
            return given
        with self.lock, torch.no_grad():
            streamed = self.weight_of(parameter)
            if streamed is not None and streamed.groups:
                return self._stand_in(streamed)
            if module and here.sign:
                self.trained.visit(module)
            given = self._read(parameter, streamed, here.sign, module)
        if streamed is not None:
            here.given[id(parameter), module] = given
            if not here.sign and not given.is_inference():
                here.lent.append((streamed, given, given._version))
        return given

    def _read(
        self, parameter: torch.Tensor, streamed: Weight | None, sign: int, module: str
    ) -> torch.Tensor:
        weight = self.trained.of(parameter)
        if streamed is not None:
            data = self.on_device(streamed)
        else:
            if weight is not None:
                self._update_in_place(parameter, module if sign else "")
            data = parameter.detach()
        if weight is None or not sign:
            return data
        return self.trained.perturbed(weight, data, sign, module=module)

    def on_device(self, weight: Weight) -> torch.Tensor:
        """Return *weight*, or a group of its rows, updated, as a view of its slot."""
        return self._view(weight, self._slots[self._arrive(weight.block)])

    def _stand_in(self, weight: Weight) -> HostWeight:
        found = self._stand_ins.get(id(weight))
        if found is None:
            found = HostWeight.of(weight, self.device, weakref.proxy(self.by_rows))
            self._stand_ins[id(weight)] = found
        return found

    @contextmanager
    def reading(self, sign: int) -> Iterator[None]:
        """Let modules read on this thread what the pass of *sign* computes with; 0: the weights."""
        here = self._pass
        before = here.sign
        try:
            here.sign = sign
            yield
            self.end_layer()
        finally:
            here.sign = before
            self._forget_written()

    def end_pass(self) -> None:
        """Leave the pass that this thread is in, where an interrupt has kept it from that."""
        self._pass.sign = None
        self._forget_written()

    def end_layer(self) -> None:
        """Let go of the weights that a layer call has read on this thread.

        Raises:
            ConflictError: it has written into one, outside of a pass.
        """
        written = self._forget_written()
        if written is not None:
            raise ConflictError(
                f"a layer changes the weight {written.name!r} in place as it runs outside of a "
                "step, and zeroth order has it on the host, where the change would be lost. Change "
                "it outside of forward, or let its layer stay on the device (num_resident).",
                key="streamed-weight-changed",
            )

    def _forget_written(self) -> Weight | None:
        """Let go of what was read; a slot that was written into is forgotten, too."""
        written = self._pass.let_go()
        if written is not None:
            with self.lock:
                self.forget(written.block)
        return written

    def hand_over(self) -> None:
        """Let the other pass run up to its next layer or piece."""
        self._hand_over()

    @property
    def sign(self) -> int | None:
        """That of the pass that the calling thread is in; None outside of one."""
        return self._pass.sign

    # ---- visits --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a forward, or both forwards of a step."""
        with self.lock, torch.no_grad():
            self.by_rows.begin()
            self._adopt_strays()
            for held in list(self.slots):
                if held is not None and self._is_stale(held):
                    self.forget(held)
            self.begin(trains=False)
            self.current = None
            self.ahead()

    def _is_stale(self, block: int) -> bool:
        """Say whether a slot does not have what *block* is to be read as."""
        return self.blocks[block].has_changed()

    def _adopt_strays(self) -> None:
        """Take weights that were given other data (``parameter.data = ...``) into their memory."""
        for block in self.blocks:
            for weight, _ in block.strays():
                block.masters.take_in(weight.master)
                for other in self.blocks:
                    if other.masters is block.masters:
                        self.forget(other.index)

    def arrive(self, block: int) -> None:
        """Have *block* on the device, updated; and let the next one come."""
        with self.lock, torch.no_grad():
            self._arrive(block)

    def _arrive(self, block: int) -> int:
        number = self.use(block, in_backward=False)
        slot = self._slots[number]
        is_new = not slot.is_here
        if is_new:
            self._slots.await_upload(slot)
        if is_new or self._seen[block] != self.trained.num_steps:
            self.ahead()  # before the update: the next upload need not wait for it
        if self._seen[block] != self.trained.num_steps:
            try:
                self._update(block, number, slot)
            except BaseException:
                self.forget(block)  # the next reader uploads the host's bits again
                self._slots.empty(slot)
                raise
        return number

    def _update(self, block: int, number: int, slot: DeviceSlot) -> None:
        """Update the trained weights in *slot* and queue their copy back; see [Note: Visits]."""
        notes = self._catch_up(block, slot)
        if notes:
            try:
                self._commit(block, number, slot, notes)
            except BaseException:
                # An interrupt, it may be, between the copy and the notes: both can be made again.
                self._commit(block, number, slot, notes)
                raise
        self._seen[block] = self.trained.num_steps

    def _commit(
        self, block: int, number: int, slot: DeviceSlot, notes: Sequence[Callable[[], None]]
    ) -> None:
        self._copy_back(block, number, slot)
        for note in notes:
            note()

    def _catch_up(self, block: int, slot: DeviceSlot) -> list[Callable[[], None]]:
        notes = []
        meant = self.blocks[block]
        assert slot.storage is not None
        if any(self.trained.is_behind(part) for _, part in meant.trained):
            # A block that has stayed in its slot since the last step may still be read from there.
            for ticket in self._copies_back.get(block, ()):
                self._transport.wait(ticket)
        for place, (weight, part) in enumerate(meant.trained):
            state = meant.state_in_slot(slot.storage, self.device, place)
            note = self.trained.catch_up(part, self._view(weight, slot), state)
            if note is not None:
                notes.append(note)
        return notes

    def _copy_back(self, block: int, number: int, slot: DeviceSlot) -> None:
        meant = self.blocks[block]
        assert slot.storage is not None
        tickets = self._copies_back[block] = []
        self._left_by[number] = block
        for start, on_host in meant.runs():
            nbytes = on_host.numel()
            ticket = self._transport.offload(
                bytes_view(slot.storage, self.device, start, start + nbytes),
                on_host,
                label=f"updated weights of {meant.layer!r}",
                times=self._slots.times,
            )
            tickets.append(ticket)
            self.offloaded_bytes += nbytes
        self.num_offloads += 1

    def _view(self, weight: Weight, slot: DeviceSlot) -> torch.Tensor:
        assert slot.storage is not None
        slot.meet()
        return weight.view_of(slot.storage, self.device)

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* into *slot*, behind the copies back of both."""
        left, self._left_by[slot] = self._left_by[slot], None
        storage = self._slots[slot].storage
        if left is not None and storage is not None and is_held_elsewhere(storage):
            # The memory is left to its holder, who may let go of it at any time.
            for ticket in self._copies_back.get(left, ()):
                self._transport.retire(ticket)
        after = list(self._copies_back.get(block, ()))
        if left is not None and left != block:
            after += self._copies_back.get(left, ())
        self._slots.upload(block, self._slots[slot], after=after)

    # ---- the end of a run of steps -------------------------------------------------------------

    def flush(self) -> None:
        """Have every weight updated by all steps, where it lives. The host waits for the copies."""
        with self.lock, torch.no_grad():
            for index, block in enumerate(self.blocks):
                if any(self.trained.is_behind(part) for _, part in block.trained):
                    self._bring_up_to_date(index)
            for weight in self.trained.weights:
                parameter = weight.ref()
                if parameter is not None and not self.streams(parameter):
                    self._update_in_place(parameter)
            self.wait_for_copies()

    def _bring_up_to_date(self, block: int) -> None:
        """Have the weights of *block* updated, and their copies back queued."""
        self._arrive(block)

    def _update_in_place(
        self, parameter: torch.Tensor, module: str = "", draw: Draw | None = None
    ) -> None:
        weight = self.trained.of(parameter)
        for part in () if weight is None else self.trained.parts_at(weight, module):
            if not self.trained.is_behind(part):
                continue
            updated = parameter.detach().clone()
            state = None if part.state is None else part.state.clone()
            note = self.trained.catch_up(part, updated, state, draw)
            if note is None:
                continue
            try:
                _put_in_place(parameter, updated, part, state, note)
            except BaseException:  # an interrupt, it may be: all of it can be done again
                _put_in_place(parameter, updated, part, state, note)
                raise

    def wait_for_copies(self, block: int | None = None) -> None:
        """Let the host wait until the copy back of *block* has ended; None: all of them."""
        for index in list(self._copies_back) if block is None else [block]:
            for ticket in self._copies_back.get(index, ()):
                self._transport.retire(ticket)
                while not self._transport.is_done(ticket):
                    time.sleep(1e-4)
        if block is None:
            self._copies_back.clear()
            self._left_by = [None] * len(self._left_by)

    def forget_all(self) -> None:
        """Upload every block again: the weights on the host may have changed."""
        with self.lock:
            for held in list(self.slots):
                if held is not None:
                    self.forget(held)

    def stop(self) -> None:
        """Let go of the slots. Copies back have ended then."""
        self.wait_for_copies()
        self.forget_all()
        self._slots.release()
        self.by_rows.stop()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        self._slots.collect()
        self.counts.num_uploads = self.num_uploads
        self.counts.num_late_uploads = self.num_late_uploads
        self.counts.pool_bytes = sum(masters.nbytes for masters in self._masters)
        return {
            **self.counts.as_dict(),
            "num_offloads": self.num_offloads,
            "offloaded_bytes": self.offloaded_bytes,
            **self.by_rows.figures(),
        }

    @property
    def _masters(self) -> list[Any]:
        return list(dict.fromkeys(block.masters for block in self.blocks))


class AtPlace:
    """What one module reads, where the noise depends on the module.

    Args:
        visits: of the model.
        module: the module's name, or that of the layer around it.
    """

    def __init__(self, visits: WeightVisits, module: str) -> None:
        self.visits = visits
        self.device = visits.device
        self._module = module

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is on the host."""
        return self.visits.streams(parameter)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is one that a pass has read."""
        return self.visits.holds(tensor)

    def read(self, parameter: Any) -> Any:
        """Return what the module's attribute gives."""
        return self.visits.read(parameter, self._module)


SOURCES = (WeightVisits, AtPlace)
"""What tables of modules have for a source."""


def _put_in_place(
    parameter: torch.Tensor,
    updated: torch.Tensor,
    part: TrainedPart,
    state: torch.Tensor | None,
    note: Callable[[], None],
) -> None:
    parameter.data.copy_(updated)
    if part.state is not None and state is not None:
        part.state.copy_(state)
    note()
