"""Weights that visit the device: a ring of blocks whose updates go back to the host.

[Note: Visits]
- A block is uploaded ahead of its layer (``transfer/ring_schedule.py``). As the layer begins, its
  trained weights are updated in the slot by the last step, and the copy back to the host is queued
  at once: passes only read, so that copy runs beside the first one.
- What a module reads is a new tensor: the weight in the slot plus or minus epsilon times the noise.
  The slot keeps the pristine bits.
- An upload into the slot waits for the copy back from it, and an upload of the block waits for the
  block's own copy back. A block that has stayed in its slot is updated there behind its last copy
  back. All are event waits.
- A weight counts as updated once the copy back is queued. If anything fails before that, the slot
  is forgotten, the host has the bits of before, and the update is made at the next visit.
- Before a step ends, what it has not read visits too: there is never more than one update to make.
- A slot keeps its memory as blocks come and go: it could be let go on the compute stream only once
  the copy back has ended, and compute would wait for that.

[Note: Packed visits]
- The masters of a packed block (see [Note: Fewer bytes]) are updated on the host before its upload.
  So a block that was uploaded before the end of a step is not what the next step reads: nothing is
  uploaded across the end of a forward, which may be that of a step.
- As the first pass of a step begins a layer, the noise of its block is drawn into the slot and goes
  back to the host. The masters' update reads it there.
- The host writes packed weights to the memory that the last upload has read, and reads the noise
  that the last copy back has written. So it waits for both; they are a whole forward old.
- Noise that is not there (a layer that was left out) is drawn on the host: it has the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Weight, weights_by_parameter
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.zeroth_order.perturbation import Draw, PastStep
from hf_pyao.engine.zeroth_order.trained import TrainedBlock, TrainedWeight, TrainedWeights
from hf_pyao.errors import ConflictError


class _Pass(threading.local):
    """State of the calling thread."""

    sign: int | None = None
    """1 and -1 in a pass of a step, 0 in another forward; None outside of a forward."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Weight, torch.Tensor, int | None]] = {}
        """By the parameter's id, what this layer call has read, and its version then, if that is
        the weight itself; None: it is perturbed."""


class WeightVisits(RingSchedule):
    """Trained and frozen weights as the modules of one model read them.

    Args:
        blocks: those on the host, in forward order, with their memory.
        trained: all trained weights of the model.
        link: transport and host memory.
        device: where compute runs.
    """

    def __init__(
        self,
        blocks: Sequence[TrainedBlock],
        trained: TrainedWeights,
        link: LinkContext,
        device: torch.device,
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
        self.in_use = threading.RLock()
        """Held by the thread that runs a step, or another forward."""
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
        self._pass = _Pass()

    # ---- what modules read: a Source of tables -------------------------------------------------

    def streams(self, parameter: object) -> bool:
        """Say whether *parameter* is on the host."""
        return self._weight_of(parameter) is not None

    def _weight_of(self, parameter: object) -> Weight | None:
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor* is one that a pass has read: no parameter of the model."""
        if any(tensor is each for _, each, _ in self._pass.given.values()):
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
        if (given := here.given.get(id(parameter))) is not None:
            return given[1]
        weight, trained = self._weight_of(parameter), self.trained.of(parameter)
        with torch.no_grad():
            if weight is not None:
                block = self.blocks[weight.block]
                data = block.read(weight, self._arrive(block))
            else:
                if trained is not None:
                    self._update_in_place(trained)
                data = parameter.detach()
            version = None if data.is_inference() else data._version
            if trained is not None and here.sign:
                data, version = self.trained.perturbed(trained, data, here.sign), None
        if weight is not None:
            here.given[id(parameter)] = weight, data, version
        return data

    @contextmanager
    def reading(self, sign: int) -> Iterator[None]:
        """Let modules read on this thread what the pass of *sign* computes with; 0: the weights."""
        try:
            self._pass.sign = sign
            yield
            self.end_layer()
        finally:
            self.end_pass()

    def end_pass(self) -> None:
        """Leave the pass that this thread is in."""
        self._pass.sign = None
        self._take_back()

    def end_layer(self) -> None:
        """Let go of the weights that a layer call has read on this thread.

        Raises:
            ConflictError: it has written into one that is not perturbed.
        """
        if (written := self._take_back()) is not None:
            raise ConflictError(
                f"a layer changes the weight {written.name!r} in place as it runs, and zeroth "
                "order has it on the host, where the change would be lost. Change it outside of "
                "forward, or let its layer stay on the device (num_resident).",
                key="streamed-weight-changed",
            )

    def _take_back(self) -> Weight | None:
        given, self._pass.given = self._pass.given, {}
        for weight, tensor, version in given.values():
            if version is not None and tensor._version != version:
                self.forget(weight.block)
                return weight
        return None

    @property
    def sign(self) -> int | None:
        """That of the pass that the calling thread is in; None outside of one."""
        return self._pass.sign

    # ---- visits --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a forward of the model."""
        with torch.no_grad():
            for block in self.blocks:
                for weight, _ in block.strays():  # given other data (`parameter.data = ...`)
                    block.masters.take_in(weight.master)
                    self.forget(block.index)
                is_stale = block.is_packed and self._is_behind(block)
                if block.index in self.slots and (is_stale or block.has_changed()):
                    self.forget(block.index)
            self.begin(trains=False)
            self.current = None
            self.ahead()

    def end_step(self, learning_rate: float, gradient: float | None) -> None:
        """End a step: weights are updated by it as they are read.

        Args:
            learning_rate: of the step.
            gradient: projected on the noise; None: the weights stay as they are.
        """
        if gradient is None:
            self.trained.end_step(None)
            return
        self._catch_up()
        self.trained.end_step(PastStep(self.trained.num_steps, learning_rate, gradient))

    def _is_behind(self, block: TrainedBlock) -> bool:
        return any(self.trained.is_behind(each) for _, each in block.trained)

    def _upcoming(self) -> Iterator[int]:
        """Yield the blocks that are read next; see [Note: Packed visits]."""
        if any(block.is_packed for block in self.blocks[:1]):
            yield from self._orders[self._trains][self._position :]
        else:
            yield from super()._upcoming()

    def _arrive(self, block: TrainedBlock) -> DeviceBlock:
        """Have *block* on the device, updated; and let the next one come."""
        slot = self._slots[self.use(block.index, in_backward=False)]
        is_new = not slot.is_here
        if is_new:
            slot.await_fill()
        is_due = self._is_behind(block)
        if block.is_packed:
            is_due = bool(self.sign and block.trained)
            is_due &= block.noise_step != self.trained.num_steps
        if is_new or is_due:
            self.ahead()  # before the update: the next upload need not wait for it
        if is_due:
            try:
                self._update(block, slot)
            except BaseException:
                self.forget(block.index)  # the next reader uploads the host's bits again
                slot.drop_fill()
                raise
        slot.meet()
        return slot

    def _update(self, block: TrainedBlock, slot: DeviceBlock) -> None:
        """Change what is in a slot, and queue the copy back to the host; see [Note: Visits]."""
        slot.meet()
        # What has stayed in its slot since the last step may still be copied from there.
        for ticket in self._copies_back.get(block.index, ()):
            self._transport.wait(ticket)
        behind = []
        if block.is_packed:
            block.draw_noise(slot)
        else:
            behind = [each for each in block.trained if self.trained.is_behind(each[1])]
        for weight, trained in behind:
            state = block.state(weight, slot)
            self.trained.update(trained, slot.plain(weight), state)

        def commit() -> None:
            self._copy_back(block, slot)
            if block.is_packed:
                block.note_noise()
            for _, trained in behind:
                self.trained.note_updated(trained)

        self._finish(commit)

    def _finish(self, run: Callable[[], None]) -> None:
        """Call *run*, all of which can be done again; after an interrupt in it once more."""
        try:
            run()
        except BaseException:
            # A copy may be queued whose ticket no one has; one behind it is known then.
            self._transport.retire_all()
            run()
            raise

    def _copy_back(self, block: TrainedBlock, slot: DeviceBlock) -> None:
        tickets = self._copies_back[block.index] = []
        for start, on_host in block.pieces_back():
            ticket = self._transport.offload(
                bytes_view(slot.storage, self.device, start, start + on_host.numel()),
                on_host,
                label=f"updated weights of {block.layer!r}",
                times=self._times,
            )
            tickets.append(ticket)
            self.offloaded_bytes += on_host.numel()
        self.num_offloads += 1

    def upload(self, block: int, slot: int) -> None:
        """Queue the copy of *block* into *slot*, behind the copies back of both."""
        meant, each = self.blocks[block], self._slots[slot]
        if meant.is_packed:
            self._pack(meant)
        left = self._copies_back.get(each.block.index, ())
        if each.num_holders > 0:
            # The memory is left to its holder, who may let go of it at any time.
            for ticket in left:
                self._transport.retire(ticket)
        each.refill(meant, self._slot_nbytes, [*self._copies_back.get(block, ()), *left])
        if meant.is_packed:
            self._uploads[block] = list(each.tickets)

    def _pack(self, block: TrainedBlock) -> None:
        """Have the weights in what crosses the link, updated."""
        has_changed = block.has_changed()
        if has_changed or self._is_behind(block):
            self._wait_for_memory(block.index)
            for weight, trained in block.trained:
                self._update_in_place(trained, block.drawn(weight))
            block.pack(also_frozen=has_changed)

    def _update_in_place(self, trained: TrainedWeight, draw: Draw | None = None) -> None:
        """Update a weight where it lives, if it is behind."""
        parameter = trained.ref()
        if parameter is None or not self.trained.is_behind(trained):
            return
        updated = parameter.detach().clone()
        state = None if trained.state is None else trained.state.clone()
        self.trained.update(trained, updated, state, draw)

        def put() -> None:
            parameter.detach().copy_(updated)
            if trained.state is not None and state is not None:
                trained.state.copy_(state)
            self.trained.note_updated(trained)

        self._finish(put)

    # ---- the host's side -----------------------------------------------------------------------

    def flush(self) -> None:
        """Have all weights updated, where they live. The host waits for the copies."""
        with nullcontext() if self.sign is not None else self.in_use:
            self._catch_up()
            self._wait_for_copies()

    def _catch_up(self) -> None:
        with torch.no_grad():
            for block in self.blocks:
                if not self._is_behind(block):
                    continue
                if block.is_packed:
                    self.forget(block.index)
                    self._pack(block)
                else:
                    self._arrive(block)
            for trained in self.trained.weights:
                if not self.streams(trained.ref()):
                    self._update_in_place(trained)

    def _wait_for_copies(self) -> None:
        for block in self.blocks:
            self._wait_for_memory(block.index)

    def _wait_for_memory(self, block: int) -> None:
        """Let the host wait until no copy reads or writes the memory of a block."""
        tickets = [*self._copies_back.pop(block, ()), *self._uploads.pop(block, ())]
        for ticket in tickets:
            self._transport.await_on_host(ticket)

    def forget_all(self) -> None:
        """Upload every block again: the weights on the host may have changed."""
        for block in self.blocks:
            self.forget(block.index)

    def stop(self) -> None:
        """Let go of the slots. Copies have ended then."""
        self._wait_for_copies()
        self.forget_all()
        for slot in self._slots:
            slot.empty()

    def figures(self) -> dict[str, Any]:
        """Return what the visits came to, as plain values."""
        self._transport.collect(self.counts, self._times)
        self.counts.num_uploads = self.num_uploads
        self.counts.num_late_uploads = self.num_late_uploads
        self.counts.pool_bytes = sum(block.host_nbytes for block in self.blocks)
        offloads = {"num_offloads": self.num_offloads, "offloaded_bytes": self.offloaded_bytes}
        return self.counts.as_dict() | offloads
