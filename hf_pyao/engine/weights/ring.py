"""The ring: when blocks of streamed weights are on the device, and what the engine tells of a step.

[Note: Pinned blocks]
While the forward of a layer runs, and while its backward is the one that runs, its modules have
tensors on the device in place of their parameters ([Note: Exchanged places]), and its block is not
emptied. A call that has ended, by an error too, pins nothing. Where a layer has several blocks, its
groups of experts come as they are read; its other weights are not pinned from then on, until a
module that has some of them runs.

[Note: Saved weights]
A saved tensor that lies in a block is known by its storage, and becomes a block and a layout. In
backward the block is filled again, and viewed in the same way.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.engine.transfer.layout import Layouts
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, RingSchedule
from hf_pyao.engine.transfer.transport import LinkTimes
from hf_pyao.engine.weights.blocks import Block, SavedBlock, SavedView, Weight, weights_by_parameter
from hf_pyao.engine.weights.device_block import DeviceBlock, HeldByGraph
from hf_pyao.engine.weights.device_weight import key_of, lost_write
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.places import Place, keeper_of
from hf_pyao.engine.weights.read_ahead import Coming, ReadAhead
from hf_pyao.engine.weights.unrecorded import unrecorded
from hf_pyao.errors import ConflictError, warn

logger = logging.getLogger(__name__)

_MOST_EXPECTED = 8
"""Uploads ahead of which blocks on a disk are looked for."""


class _Call:
    """A forward of a layer that runs, or its backward."""

    def __init__(self, layer: int, *, is_in_groups: bool = False) -> None:
        self.layer = layer
        self.is_in_groups = is_in_groups
        """Its experts run, of which groups are on the device one after another."""


class WeightRing(RingSchedule):
    """Blocks that are on the device while they are used.

    Args:
        blocks: in forward order, with their memory.
        layers: by number of the layer, its module, held weakly.
        blocks_of_layer: by number of the layer, its blocks; empty for a layer that stays.
        link: has the transport.
        device: where compute runs.
        num_slots: how many blocks are there at a time.
        on_forward: called as a forward begins.
        counts: what is counted further; None: anew.
        read_ahead: reads blocks that are on a disk; None: none are.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        layers: Sequence[weakref.ref[nn.Module]],
        blocks_of_layer: Sequence[Sequence[int]],
        link: LinkContext,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
        on_forward: Callable[[], None] = lambda: None,
        counts: UploadFigures | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(len(blocks), num_slots)
        self.blocks = tuple(blocks)
        self.device = device
        self.counts = UploadFigures() if counts is None else counts
        """What was counted so far."""
        self.times = LinkTimes()
        """What the uploads took, and compute's waits for them."""
        self.on_device = tuple(
            DeviceBlock(each, link, device, self.counts, self.times, read_ahead) for each in blocks
        )
        """By block, its side on the device."""
        self._num_slots = num_slots
        self._layers = tuple(layers)
        self._blocks_of_layer = tuple(blocks_of_layer)
        self._layer_of = {n: layer for layer, each in enumerate(blocks_of_layer) for n in each}
        self._on_forward = on_forward
        self._transport = link.transport
        self._read_ahead = read_ahead
        self._masters = tuple(dict.fromkeys(block.masters for block in blocks))
        self.counts.pool_bytes = sum(m.nbytes for m in self._masters if m.in_file is None)
        self.counts.staging_bytes = 0 if read_ahead is None else read_ahead.nbytes
        self._counted_before = self.counts.num_uploads, self.counts.num_late_uploads
        self._weights = weights_by_parameter(blocks)
        self._by_key: dict[int | None, int] = {
            each.key: each.block.index for each in self.on_device
        }
        """By storage, the block."""
        self._places: dict[tuple[int, bool], list[Place]] = {}
        """By layer, and whether they are of experts in groups."""
        self._exchanged: set[tuple[int, bool]] = set()
        """Those that may have what is on the device."""
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._backward: _Call | None = None
        """That of the layer whose backward runs; in groups where the layer has several blocks."""
        self._backward_task = NO_TASK
        self._layouts = Layouts()
        self._lock = threading.RLock()  # autograd runs a thread for each device
        self._has_told_of_holders = False

    def add_place(self, block: int, place: Place, *, is_of_groups: bool = False) -> None:
        """Exchange *place* while the layer of *block* runs."""
        self._places.setdefault((self._layer_of[block], is_of_groups), []).append(place)

    @property
    def slot_bytes(self) -> int:
        """Size of the largest block."""
        return max((block.nbytes for block in self.blocks), default=0)

    def weight_of(self, parameter: object) -> Weight | None:
        """Return what is streamed of *parameter*; None if nothing is."""
        weight = self._weights.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    # ---- layers that run -----------------------------------------------------------------------

    @contextmanager
    def inside(self, layer: int) -> Iterator[None]:
        """Have layer number *layer* find its weights on the device while its forward runs.

        Raises:
            ConflictError: the layer has written into one of them.
        """
        call, has_gradients = _Call(layer), torch.is_grad_enabled()
        try:
            with self._lock, unrecorded():
                blocks = self._blocks_of_layer[layer]
                if blocks:
                    first = self.blocks[blocks[0]]
                    if current_graph_task() == NO_TASK:
                        first.masters.refuse_thawed()
                    self._forget_changed(blocks[0])
                    self._calls.add(call)
                    self._bring(blocks[0], goes_ahead=False)
                else:
                    self.leave(in_backward=current_graph_task() != NO_TASK)
                self._settle()
                self.ahead()
            yield
            self._end(call)
        except BaseException as error:  # an interrupt, it may be, as grad mode was being exchanged
            if not isinstance(error, GeneratorExit):  # then this was left behind, and ends now
                torch.set_grad_enabled(has_gradients)
            self._end(call)
            raise

    def _end(self, call: _Call) -> None:
        with self._lock, unrecorded():
            self._calls.discard(call)
            self._settle()

    def begin_groups(self, layer: int, *, are_read: bool) -> None:
        """Note what layer number *layer*, of several blocks, reads from here on.

        Args:
            layer: whose forward runs.
            are_read: its experts in groups: its other weights may leave meanwhile. False: those,
                which come back.
        """
        calls = [call for call in self._running() if call.layer == layer]
        if all(call.is_in_groups == are_read for call in calls):
            return
        with self._lock, unrecorded():
            for call in calls:
                call.is_in_groups = are_read
            if not are_read:
                self._bring(self._blocks_of_layer[layer][0])
            self._settle()

    def _settle(self) -> None:
        """Exchange the places of layers that run, and only of these; see [Note: Pinned blocks].

        Raises:
            ConflictError: a layer has written into a weight.
        """
        running = self._running()
        wanted = {(call.layer, True) for call in running}
        wanted |= {(call.layer, False) for call in running if not call.is_in_groups}
        for key in self._exchanged - wanted:
            self._take_out(key)
        for key in wanted - self._exchanged:
            self._exchanged.add(key)
            for place in self._places.get(key, ()):
                place.put_in()
        while len(self.slots) > self._num_slots:
            spare = [each for each in self.slots if each is None or each not in self._pinned()]
            if not spare:
                return
            self.slots.remove(spare[0])
            if spare[0] is not None:
                self._empty(self.on_device[spare[0]])

    def _take_out(self, key: tuple[int, bool]) -> None:
        for place in self._places.get(key, ()):
            place.take_out()
        self._exchanged.discard(key)
        for block in self._blocks_of_layer[key[0]]:
            self._take_back(self.on_device[block])

    def _take_back(self, each: DeviceBlock) -> None:
        """Take back what modules were given of a block.

        Raises:
            ConflictError: a layer has written into a weight.
        """
        if (written := each.take_back()) is not None:
            self.forget(each.block.index)
            error = lost_write(written)
            if sys.exc_info()[0] is None:
                raise error
            warn(logger, "streamed-weight-changed", "%s", error, level=logging.ERROR)

    def _pinned(self) -> set[int]:
        """Return the blocks that are not emptied now."""
        layers = {call.layer for call in self._running() if not call.is_in_groups}
        return {each[0] for layer in layers if (each := self._blocks_of_layer[layer])}

    def _running(self) -> list[_Call]:
        return [*self._calls, *([] if self._backward is None else [self._backward])]

    def _refuse_casts(self) -> None:
        dtype = torch.get_autocast_dtype(self.device.type)
        for weight in (each for block in self.blocks for each in block.weights):
            is_cast = weight.dtype.is_floating_point and weight.dtype != dtype
            if is_cast and isinstance(weight.ref(), Parameter):
                raise ConflictError(
                    f"{weight.name!r} is {weight.dtype} and streamed, and autocast would cast it "
                    f"to {dtype} each time that it is read. Load the base model in autocast's "
                    "dtype (dtype=...), or give stream_weights='off'.",
                    key="streamed-weight-cast",
                )

    # ---- what the engine tells -----------------------------------------------------------------

    def begin_forward(self, *, trains: bool) -> None:
        """Begin a forward, and let the first blocks come.

        Raises:
            ConflictError: a streamed weight requires gradients by now, or autocast would cast one.
        """
        has_gradients = torch.is_grad_enabled()
        try:
            with self._lock, unrecorded():
                self._on_forward()
                self._collect()
                if trains and torch.is_autocast_enabled(self.device.type):
                    self._refuse_casts()
                for masters in self._masters:
                    masters.refuse_thawed()
                    if masters.in_file is not None:
                        masters.in_file.let_go_of_pages()
                self._forget_changed_on_host()
                self.begin(trains=trains)
                self.current = self._backward = None
                self._settle()
                self.ahead()
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise

    def refuse_compiled(self) -> None:
        """Refuse to go on in compiled code, which reads weights by itself.

        Raises:
            ConflictError: always.
        """
        raise compiled_by_now("the model, or a layer of it,")

    def begin_backward(self, layer: int) -> None:
        """Bring the block of layer number *layer*, whose backward begins.

        What comes next is left to :meth:`upload_ahead`: the layer's own reloads go before it. Of
        several blocks each comes when it is read, and ahead of that by the order of the schedule.
        """
        with self._lock, unrecorded():
            if not self._has_run_back:
                self._forget_changed_on_host()
            blocks = self._blocks_of_layer[layer]
            if not blocks:
                self.leave(in_backward=True)
                self._run_back(None)
            elif len(blocks) == 1:
                self._forget_changed(blocks[0])
                self._bring(blocks[0], goes_ahead=False)
            else:
                self._run_back(layer)

    def _run_back(self, layer: int | None) -> None:
        """Note that the backward of *layer* runs; None: that of one which is not streamed."""
        task = current_graph_task()
        if task != self._backward_task:
            self._backward_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if layer != (None if self._backward is None else self._backward.layer):
            is_divided = layer is not None and len(self._blocks_of_layer[layer]) > 1
            self._backward = None if layer is None else _Call(layer, is_in_groups=is_divided)
            self._settle()

    def _end_backward(self) -> None:
        with self._lock, unrecorded():
            self._backward, self._backward_task = None, NO_TASK
            self._settle()

    def upload_ahead(self) -> None:
        """Upload what is used next."""
        with self._lock, unrecorded():
            self.ahead()

    def stop(self) -> None:
        """Let go of the device's memory. Graphs that hold handles bring their blocks again."""
        has_gradients = torch.is_grad_enabled()
        try:
            with self._lock, unrecorded():
                self._calls.clear()
                self._backward = None
                self._settle()
                self._places.clear()
                for held in list(self.slots):
                    if held is not None:
                        self.forget(held)
                for each in self.on_device:
                    self._empty(each, refuses=False)
                if self._read_ahead is not None:
                    self._read_ahead.release()
        except BaseException:  # an interrupt, it may be, as grad mode was being exchanged
            torch.set_grad_enabled(has_gradients)
            raise

    def figures(self) -> UploadFigures:
        """Return what the uploads came to. Copies that run still are counted, and not yet timed."""
        counts = self.counts
        num_before, num_late_before = self._counted_before
        counts.num_uploads = num_before + self.num_uploads
        counts.num_late_uploads = num_late_before + self.num_late_uploads
        self._collect()
        return counts

    def stalls_ms(self) -> tuple[float, float]:
        """Return how long forward and backward compute have waited for uploads, in ms."""
        counts = self.figures()
        return counts.stall_forward_ms, counts.stall_backward_ms

    def _collect(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead.note_reads()
        self._transport.collect(self.counts, self.times)

    # ---- uploads -------------------------------------------------------------------------------

    def use(self, block: int, *, in_backward: bool) -> int:
        """Have *block* in a slot; where all slots have blocks that are pinned, in one more."""
        if block not in self.slots and self._pinned().issuperset(self.slots):
            self.slots.append(None)
        return super().use(block, in_backward=in_backward)

    def _latest(self, sooner: Sequence[int]) -> int | None:
        return super()._latest([*sooner, *self._pinned()])

    def upload(self, block: int, slot: int) -> None:
        """Queue the fill of *block*, once all have left that are in no slot."""
        for each in self.on_device:
            number = each.block.index
            if each.is_full and number not in self.slots and number not in (block, self.current):
                self._empty(each)
        self.on_device[block].fill()

    def _empty(self, each: DeviceBlock, *, refuses: bool = True) -> None:
        if not each.is_full:
            return
        self._take_back(each)
        key, nbytes = each.key, each.block.nbytes
        if each.empty():
            return
        del self._by_key[key]
        self._by_key[each.key] = each.block.index
        layer = self._layers[self._layer_of[each.block.index]]()
        if refuses and layer is not None and (path := keeper_of(layer, key)):
            raise ConflictError(
                f"layer {each.block.layer!r} keeps a view of a frozen weight as {path!r}, and its "
                "weights are streamed: the view would not follow changes of the weight. Make it "
                "anew in each forward, or give stream_weights='off'.",
                key="streamed-weight-held",
            )
        self.counts.num_left += 1
        self.counts.left_bytes += nbytes
        if not self._has_told_of_holders:
            self._has_told_of_holders = True
            warn(
                logger,
                "streamed-weight-held",
                "someone holds frozen weights longer than layer %r runs, as an autograd function "
                "does that keeps them on `ctx`: these %.3f GiB stay on the device until they are "
                "let go.",
                each.block.layer,
                nbytes / 2**30,
            )

    def _forget_changed_on_host(self) -> None:
        """Have what is on the device brought again if it is not what the host has by now."""
        for held in list(self.slots):
            if held is not None and self.blocks[held].has_changed():
                self.forget(held)

    def _forget_changed(self, block: int) -> None:
        if block in self.slots and self.blocks[block].has_new_marks():
            self.forget(block)

    def _bring(self, block: int, *, goes_ahead: bool = True) -> DeviceBlock:
        """Have *block* on the device, and the current stream ordered behind its fill."""
        each = self.on_device[block]
        runs_back = current_graph_task() != NO_TASK
        if not (block == self.current and block in self.slots and each.is_here):
            self._forget_changed(block)
            self.use(block, in_backward=runs_back)
            if not each.is_here:
                try:
                    each.await_fill()
                except BaseException:
                    super().forget(block)  # it is brought again where it is used next
                    raise
            if goes_ahead:
                self.ahead()
        if runs_back:
            self._run_back(self._layer_of[block])
        each.meet()
        return each

    def tensor_of(self, weight: Weight) -> torch.Tensor:
        """Return *weight* on the device, ready for compute on the current stream."""
        with self._lock, unrecorded():
            return self._bring(weight.block).weight(weight)

    def ahead(self) -> None:
        """Upload what is used next, and read ahead what is uploaded after that."""
        super().ahead()
        if self._read_ahead is not None:
            self._read_ahead.expect(self._coming_from_disk(self._read_ahead))

    def _coming_from_disk(self, read_ahead: ReadAhead) -> list[Coming]:
        """Return the blocks that are read next, as many as have room."""
        found: list[Coming] = []
        nbytes = 0
        for block in map(self.blocks.__getitem__, self.coming(_MOST_EXPECTED)):
            in_file = block.masters.in_file
            if in_file is not None and nbytes < read_ahead.nbytes:
                found.append((block.index, in_file, block.spans(read_ahead.piece_bytes)))
                nbytes += block.nbytes
        return found

    # ---- what graphs hold ----------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return what gives *tensor* again, if it lies in a block; else None."""
        number = self._by_key.get(key_of(tensor))
        if number is None:
            return None
        weight = self.blocks[number].weight_at(int(tensor.storage_offset()) * tensor.itemsize)
        storage = functools.partial(self._storage_of, number)
        return SavedView(weight, self._layouts.of(tensor), storage)

    def find_block(self, tensor: torch.Tensor) -> SavedBlock | None:
        """Return what gives the bytes of *tensor*'s block again; None if it lies in none."""
        number = self._by_key.get(key_of(tensor))
        if number is None:
            return None
        storage = functools.partial(self._storage_of, number)
        return SavedBlock(self.blocks[number].weights, storage)

    def _storage_of(self, block: int) -> torch.UntypedStorage:
        each = self.on_device[block]
        if block == self.current and block in self.slots and each.is_here and each.is_at_home:
            return each.storage
        with self._lock, unrecorded():
            return self._bring(block).storage

    def holding(self, block: int, run: Callable[[], Any]) -> Any:
        """Return what *run* returns; nodes of its graph may hold views of *block*."""
        each = self.on_device[block]
        before = each.num_holders
        output = run()
        number = each.num_holders - before
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            held = HeldByGraph(number, functools.partial(self._fill_for_graph, block))
            each.note_graph(held)
            output.grad_fn.register_prehook(held)
        return output

    def _fill_for_graph(self, block: int) -> None:
        with self._lock, unrecorded():
            self._bring(block)


def compiled_by_now(what: str) -> ConflictError:
    """Return the error for *what*, which was compiled after the weights were put on the host."""
    return ConflictError(
        f"{what} was compiled after it was attached, and its frozen weights are streamed: compiled "
        "code reads weights by itself. Train without torch.compile, or detach and give "
        "stream_weights='off'.",
        key="streaming-compiled",
    )
