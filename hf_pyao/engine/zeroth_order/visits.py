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
- A slot keeps its memory as blocks come and go: it could be let go on the compute stream only once
  the copy back has ended, and compute would wait for that.

[Note: Packed visits]
- The masters of a packed block (see [Note: Fewer bytes]) are updated on the host before its upload.
  So a block that was uploaded before the end of a step is not what the next step reads: nothing is
  uploaded across that end.
- As a layer begins in a step, the noise of its block is drawn into the slot, once for both passes,
  and goes back to the host. The masters' update reads it there.
- The host writes packed weights to the memory that the last upload has read and the last copy back
  has written. So it waits for both; they are a whole forward old.
- Noise that is not there (a layer that was left out, a block that was uploaded again) is drawn on
  the host: it has the same bits.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Weight, weights_by_parameter
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.packed_block import PackedBlock
from hf_pyao.engine.zeroth_order.perturbation import Draw
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeights
from hf_pyao.errors import ConflictError

_MOST_KEPT = 8
"""Steps after which weights are updated that nothing has read meanwhile."""


class _Pass(threading.local):
    """State of the calling thread."""

    sign: int | None = None
    """1 and -1 in a pass of a step, 0 in another forward; None outside of a forward."""

    def __init__(self) -> None:
        self.given: dict[int, torch.Tensor] = {}
        """What this layer call has read, by the parameter's id."""
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
        hand_over: called between two pieces of a weight that is read by rows.
        rounded: by ``id``, matrices of layers that stay, which are read as if they had travelled.
    """

    def __init__(
        self,
        blocks: Sequence[VisitBlock],
        trained: TrainedWeights,
        link: LinkContext,
        device: torch.device,
        hand_over: Callable[[], None] = lambda: None,
        rounded: Collection[int] = frozenset(),
    ) -> None:
        super().__init__(len(blocks), NUM_SLOTS)
        self.device = device
        self.trained = trained
        self.blocks = tuple(blocks)
        self.counts = UploadFigures()
        self.num_offloads = 0
        """Copies of blocks back to the host."""
        self.offloaded_bytes = 0
        """Bytes that they copied."""
        self.link = link
        self.hand_over = hand_over
        """Lets the other pass run up to its next layer or piece."""
        self._rounded = rounded
        self._transport = link.transport
        self._times = LinkTimes()
        self._slot_nbytes = max((block.nbytes for block in blocks), default=0)
        self._slots = [
            DeviceBlock(blocks[0], link, device, self.counts, self._times)
            for _ in range(NUM_SLOTS if blocks else 0)
        ]
        self._weights = weights_by_parameter(blocks)
        self._copies_back: dict[int, list[Any]] = {}
        """By block, the tickets of its newest copy back."""
        self._uploads: dict[int, list[Any]] = {}
        """By packed block, the tickets of its newest upload."""
        self._left_by: list[int | None] = [None] * NUM_SLOTS
        """By slot, the block whose copy back may still read it."""
        self._seen: dict[int, int] = {}
        """By block, how many steps its weights have seen; by packed one, the step whose noise is in
        its slot."""
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
        return any(tensor.untyped_storage()._cdata == slot.key for slot in self._slots)

    def read(self, parameter: Any) -> Any:
        """Return what a module's attribute gives where *parameter* is in its table.

        In a pass the perturbed weight, in another forward the weight, on the device. Elsewhere the
        parameter.
        """
        here = self._pass
        if here.sign is None or parameter is None:
            return parameter
        given = here.given.get(id(parameter))
        if given is not None:
            return given
        with self.lock, torch.no_grad():
            streamed = self.weight_of(parameter)
            given = self._read(parameter, streamed, here.sign)
        if streamed is not None:
            here.given[id(parameter)] = given
            if not here.sign and not given.is_inference():
                here.lent.append((streamed, given, given._version))
        return given

    def _read(self, parameter: torch.Tensor, streamed: Weight | None, sign: int) -> torch.Tensor:
        trained, draw = self.trained.of(parameter), None
        if streamed is None:
            self._update_in_place(parameter)
            data = parameter.detach()
            if id(parameter) in self._rounded:
                data = int8_transfer.rounded(data)
        else:
            data = self.on_device(streamed)
            block = self.blocks[streamed.block]
            if trained is not None and sign and isinstance(block, PackedBlock):
                storage = self._slots[self.slots.index(block.index)].storage
                draw = block.draw_from_slot(streamed, storage, self.device)
        if trained is None or not sign:
            return data
        return self.trained.perturbed(trained, data, sign, draw=draw)

    def on_device(self, weight: Weight) -> torch.Tensor:
        """Return *weight*, or a group of its rows, updated: a view of its slot if not packed."""
        slot = self._slots[self._arrive(weight.block)]
        slot.meet()
        return self.blocks[weight.block].read(weight, slot.storage, self.device)

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

    @property
    def sign(self) -> int | None:
        """That of the pass that the calling thread is in; None outside of one."""
        return self._pass.sign

    # ---- visits --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a forward, or both forwards of a step."""
        with self.lock, torch.no_grad():
            self._adopt_strays()
            if self.trained.num_kept > _MOST_KEPT:
                self.flush(least=2)
            for held in list(self.slots):
                if held is not None and self._is_stale(held):
                    self.forget(held)
            self.begin(trains=False)
            self.current = None
            self.ahead()

    def _is_stale(self, block: int) -> bool:
        """Say whether a slot does not have what *block* is to be read as."""
        meant = self.blocks[block]
        is_behind = isinstance(meant, PackedBlock) and self._is_behind(meant)
        return is_behind or meant.has_changed()

    def _is_behind(self, meant: VisitBlock, least: int = 1) -> bool:
        return any(self.trained.is_behind(part, least) for _, part in meant.trained)

    def _upcoming(self) -> Iterator[int]:
        """Yield the blocks that are read next; see [Note: Packed visits]."""
        if self.trained.is_packed:
            yield from self._orders[self._trains][self._position :]
        else:
            yield from super()._upcoming()

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
        meant = self.blocks[block]
        number = self.use(block, in_backward=False)
        slot = self._slots[number]
        is_new = not slot.is_here
        if is_new:
            slot.await_fill()
        is_due = self._seen.get(block) != self.trained.num_steps
        if isinstance(meant, PackedBlock):  # noise is drawn in the passes of a step alone
            is_due &= bool(self.sign and meant.trained)
        if is_new or is_due:
            self.ahead()  # before the update: the next upload need not wait for it
        if is_due:
            try:
                self._update(meant, number)
            except BaseException:
                self.forget(block)  # the next reader uploads the host's bits again
                slot.drop_fill()
                raise
        return number

    def _update(self, meant: VisitBlock, number: int) -> None:
        """Change what is in a slot, and queue the copy back to the host; see [Note: Visits]."""
        notes = self._catch_up(meant, self._slots[number])
        if notes:
            try:
                self._commit(meant, number, notes)
            except BaseException:
                # An interrupt, it may be, between copies and notes: both can be made again. A copy
                # may be queued whose ticket no one has; one behind it is known then.
                self._transport.retire_all()
                self._commit(meant, number, notes)
                raise
        self._seen[meant.index] = self.trained.num_steps

    def _commit(self, meant: VisitBlock, number: int, notes: Sequence[Callable[[], None]]) -> None:
        self._copy_back(meant, number)
        for note in notes:
            note()

    def _catch_up(self, meant: VisitBlock, slot: DeviceBlock) -> list[Callable[[], None]]:
        """Update the trained weights in *slot*, or draw noise there; return what notes it."""
        slot.meet()
        if isinstance(meant, PackedBlock) or self._is_behind(meant):
            # What has stayed in its slot since the last step may still be copied from there.
            for ticket in self._copies_back.get(meant.index, ()):
                self._transport.wait(ticket)
        if isinstance(meant, PackedBlock):
            return [meant.draw_noise(slot.storage, self.device)]
        found = (
            self.trained.catch_up(
                part,
                meant.read(weight, slot.storage, self.device),
                meant.state_in_slot(slot.storage, self.device, place),
            )
            for place, (weight, part) in enumerate(meant.trained)
        )
        return [note for note in found if note is not None]

    def _copy_back(self, meant: VisitBlock, number: int) -> None:
        tickets = self._copies_back[meant.index] = []
        self._left_by[number] = meant.index
        for start, on_host in meant.runs():
            nbytes = on_host.numel()
            ticket = self._transport.offload(
                bytes_view(self._slots[number].storage, self.device, start, start + nbytes),
                on_host,
                label=f"updated weights of {meant.layer!r}",
                times=self._times,
            )
            tickets.append(ticket)
            self.offloaded_bytes += nbytes
        self.num_offloads += 1

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* into *slot*, behind the copies back of both."""
        meant, each = self.blocks[block], self._slots[slot]
        if isinstance(meant, PackedBlock):
            self._pack(meant)
        left, self._left_by[slot] = self._left_by[slot], None
        if left is not None and each.num_holders > 0:
            # The memory is left to its holder, who may let go of it at any time.
            for ticket in self._copies_back.get(left, ()):
                self._transport.retire(ticket)
        after = list(self._copies_back.get(block, ()))
        if left is not None and left != block:
            after += self._copies_back.get(left, ())
        if not each.refill(meant, self._slot_nbytes, after):
            self.counts.num_left += 1
            self.counts.left_bytes += self._slot_nbytes
        if isinstance(meant, PackedBlock):
            self._uploads[block] = list(each.tickets)

    def _pack(self, meant: PackedBlock) -> None:
        """Update the masters of a block, and write them in int8 to the memory of its upload."""
        self._seen.pop(meant.index, None)
        if meant.has_changed():
            meant.note_change(of_frozen=True)
        self._update_masters(meant)
        if not meant.is_filled:
            self._wait_for_memory(meant.index)
            meant.fill()

    def _update_masters(self, meant: PackedBlock) -> None:
        """Update the weights on the host by the steps that they have not seen."""
        if not self._is_behind(meant):
            return
        self._wait_for_memory(meant.index)
        meant.note_change(of_frozen=False)
        for weight, _ in meant.trained:
            parameter = weight.ref()
            if parameter is not None:
                self._update_in_place(parameter, meant.draw_on_host(weight))

    def _wait_for_memory(self, block: int) -> None:
        """Let the host wait until no copy reads or writes the memory of a packed block."""
        self._wait(self._copies_back.get(block, ()))
        self._wait(self._uploads.pop(block, ()))

    # ---- the end of a run of steps -------------------------------------------------------------

    def flush(self, least: int = 1) -> None:
        """Have weights updated by all steps, where they live. The host waits for the copies.

        Args:
            least: those are, which are to be updated by so many steps or more.
        """
        with self.lock, torch.no_grad():
            for block in self.blocks:
                if not self._is_behind(block, least):
                    continue
                if isinstance(block, PackedBlock):
                    self._update_masters(block)
                    self.forget(block.index)
                else:
                    self._arrive(block.index)
            for weight in self.trained.weights:
                parameter = weight.ref()
                if parameter is not None and not self.streams(parameter):
                    self._update_in_place(parameter, least=least)
            self.wait_for_copies()

    def _update_in_place(
        self, parameter: torch.Tensor, draw: Draw | None = None, least: int = 1
    ) -> None:
        weight = self.trained.of(parameter)
        for part in () if weight is None else weight.parts:
            if not self.trained.is_behind(part, least):
                continue
            updated = parameter.detach().clone()
            state = None if part.state is None else part.state.clone()
            note = self.trained.catch_up(part, updated, state, draw)
            if note is None:
                continue
            put = functools.partial(_put_in_place, parameter, updated, part, state, note)
            try:
                put()
            except BaseException:  # an interrupt, it may be: all of it can be done again
                put()
                raise

    def wait_for_copies(self, block: int | None = None) -> None:
        """Let the host wait until the copy back of *block* has ended; None: all of them."""
        for index in list(self._copies_back) if block is None else [block]:
            self._wait(self._copies_back.get(index, ()))
        if block is None:
            self._copies_back.clear()
            self._left_by = [None] * len(self._left_by)

    def _wait(self, tickets: Sequence[Any]) -> None:
        for ticket in tickets:
            self._transport.retire(ticket)
            while not self._transport.is_done(ticket):
                time.sleep(1e-4)

    def forget_all(self) -> None:
        """Upload every block again: the weights on the host may have changed."""
        with self.lock:
            for held in list(self.slots):
                if held is not None:
                    self.forget(held)

    def stop(self) -> None:
        """Let go of the slots. Copies back have ended then."""
        self.wait_for_copies()
        for block in list(self._uploads):
            self._wait_for_memory(block)
        self.forget_all()
        for slot in self._slots:
            slot.empty()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        self._transport.collect(self.counts, self._times)
        self.counts.num_uploads = self.num_uploads
        self.counts.num_late_uploads = self.num_late_uploads
        masters = dict.fromkeys(block.masters for block in self.blocks)
        packed = [block for block in self.blocks if isinstance(block, PackedBlock)]
        self.counts.pool_bytes = sum(each.nbytes for each in masters)
        self.counts.pool_bytes += sum(block.packed_nbytes for block in packed)
        return {
            **self.counts.as_dict(),
            "num_offloads": self.num_offloads,
            "offloaded_bytes": self.offloaded_bytes,
        }


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
