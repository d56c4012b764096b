"""Records a training step as a :class:`~hf_pyao.plan.step.step_program.StepProgram`.

A :class:`StepRecorder` is an observer of the engine, and is told of operations and copies by the
mode and the transport of ``recording_mode``. It takes real tensors and fake ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.engine.codecs.row_statistics import is_row_statistic
from hf_pyao.engine.recompute.dispatch_modes import current_mode
from hf_pyao.engine.recompute.operations import unannotated_writes
from hf_pyao.engine.runtime.observer import Observer, Result
from hf_pyao.engine.runtime.policy import Decision
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import is_recomputing
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.layout import row_length
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.hardware.kernel_workspaces import call_of, workspace_of
from hf_pyao.plan.hardware.operation_costs import cost_of, dequantisation_bytes, is_question
from hf_pyao.plan.step.layer_graph import INPUT, MADE, PARAMETER, GraphRecorder, LayerGraph
from hf_pyao.plan.step.ledger import without_cache_for
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    ROW_STATISTIC,
    Collective,
    Operation,
    Pack,
    Segment,
    SlotUse,
    StepProgram,
)
from hf_pyao.plan.step.storage_recorder import StorageRecorder
from hf_pyao.plan.step.weight_reads import StreamableTensors

NUM_PACKED_LAYERS = 2
"""Layers of which every saved tensor is noted, those that were saved before too."""


class _OpenSlot:
    """A slot whose use is not known to its end."""

    def __init__(self, slot: Slot, stays: str | None, packed_at: int) -> None:
        self.slot = slot
        self.stays = stays
        self.packed_at = packed_at
        self.left_at = packed_at
        self.source = -1
        self.link_bytes = 0
        self.row_values = 0
        self.reloaded = -1
        self.unpacked_at = -1
        self.unpack_rank = 0
        self.asked_again: list[int] = []
        self.is_rebuilt = False
        """It neither stayed nor left, but was recomputed."""
        self.is_read_first = False

    def use(self) -> SlotUse:
        """Return what is known of it now."""
        return SlotUse(
            self.slot.name,
            self.slot.layer_index,
            self.slot.nbytes,
            self.link_bytes,
            self.stays,
            self.source,
            self.packed_at,
            self.left_at,
            self.reloaded,
            self.unpacked_at,
            tuple(self.asked_again),
            self.unpack_rank,
            self.row_values,
            self.is_read_first,
        )


class StepRecorder(Observer):
    """What is seen of a step: operations, storages, slots, layers.

    Args:
        fake_mode: the mode that the operations run in, if they are on fake tensors.
        kernels: the device and the process that the step is recorded for.
        device: where the step computes: tensors of other devices do not count, as shards that FSDP2
            keeps on the host. None: all count.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode | None = None,
        kernels: KernelSettings = ANY_DEVICE,
        device: torch.device | None = None,
    ) -> None:
        self._kernels = kernels
        self.is_paused = False
        self.num_runs = 1
        """How often what is seen now is to run, where it is shown once."""
        self._fake_mode = fake_mode
        self._storages = StorageRecorder(device, is_fake=fake_mode is not None)
        self._layer_names: tuple[str, ...] = ()
        self._layer_numbers: dict[str, int] = {}
        self._operations: list[Operation] = []
        self._open: dict[tuple[int, str], _OpenSlot] = {}
        self._slots: list[_OpenSlot] = []
        self._segments: list[tuple[str, int, int]] = [(FORWARD, OUTSIDE, 0)]
        self._num_unpacks = 0
        self._is_rebuilding = False
        """True while a dropped slot is rebuilt."""
        self._packs: list[Pack] = []
        self._packed_buffers: list[int] = []
        self._shapes: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        """Of what each layer saves."""
        self._row_values = 0
        """Of what is being saved, see :class:`SlotUse`."""
        self._labels: dict[int, str] = {}
        self._paths: list[str] = [""]
        self._graph: GraphRecorder | None = None
        self._num_collectives = 0
        self._beside: list[int] = []
        """Which of them run beside compute: reductions."""

    @property
    def now(self) -> int:
        """Number of operations so far."""
        return len(self._operations)

    def begin(
        self,
        layer_names: Sequence[str],
        is_host: Callable[[torch.UntypedStorage], bool],
        *,
        with_graph: bool = True,
    ) -> None:
        """Record what the attached model is.

        Args:
            layer_names: qualified names of the layers, in forward order.
            is_host: says which storages are the host's.
            with_graph: record what of a layer could be rebuilt from what.
        """
        self._layer_names = tuple(layer_names)
        if with_graph:
            self._graph = GraphRecorder(min(1, len(self._layer_names) - 1))
        self._layer_numbers = {name: number for number, name in enumerate(layer_names)}
        self._storages.leave_out(is_host)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a context in which no operation is recorded."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def count_as(self, num_runs: int) -> None:
        """Let what is seen from now on stand for *num_runs* runs of it."""
        self.num_runs = num_runs

    # ---- storages and operations ---------------------------------------------------------------

    def note_residents(
        self, tensors: Iterable[tuple[str, torch.Tensor]], streamable: StreamableTensors
    ) -> int:
        """Record what is there before the step; return its bytes.

        Args:
            tensors: of the model, by qualified name; one with several names under each of them.
            streamable: those that may be streamed.
        """
        return self._storages.note_residents(
            ((self._layer_of(name), tensor) for name, tensor in tensors), streamable
        )

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was given other memory, or none: the buffer in it ends."""
        self._storages.resized(storage, self.now)

    def _layer_of(self, name: str) -> int:
        """Return the layer that has the tensor *name*."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._layer_numbers:
                return self._layer_numbers[name]
        return OUTSIDE

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it."""
        if self.is_paused or is_question(func):
            return func(*args, **kwargs)
        self._storages.sweep(self.now)
        result = self._run(func, args, kwargs)
        inputs = [*tensors_in((*args, *kwargs.values()) if kwargs else args)]
        outputs = [result] if isinstance(result, torch.Tensor) else [*tensors_in(result)]
        cost = cost_of(func, args, kwargs, result, inputs, outputs)
        self._enter_head()
        self._storages.note_gathered(inputs)
        made = self._storages.new_among(outputs)
        if cost is None and not made:
            return result  # a view, or the host's
        self._note_dequantisation(func, args)
        number = self.now
        call = call_of(func, args, kwargs)
        self._operations.append(
            Operation(
                func._overloadpacket.__name__,
                "" if is_recomputing() else self._paths[-1],  # where no hook of a module is called
                0.0 if cost is None else cost.flops,
                0 if cost is None else cost.nbytes,
                cost is not None,
                self.num_runs,
                workspace_of(call, self._kernels),
                call,
                self._storages.weight_reads.of(inputs),
            )
        )
        self._storages.note_new(made, number)
        if made:
            self._storages.note_forms(outputs)
        self._note_dependencies(func, number, args, inputs, outputs)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; it is not dispatched again if the next mode knows what it returns."""
        at_once = getattr(current_mode(), "at_once", None)
        result = None if at_once is None else at_once(func, args, kwargs)
        if result is not None:
            return result
        with without_cache_for(self._fake_mode, func):
            return func(*args, **kwargs)

    def exchanged(self, collective: Collective, num_beside: int) -> None:
        """Record a collective.

        Args:
            collective: what it exchanges.
            num_beside: how many such may run beside compute; with 0 compute waits for this one.
        """
        self._storages.sweep(self.now)
        beside, awaits = self._beside, 0
        if 0 < num_beside <= len(beside):
            awaits = self._num_collectives - beside[-num_beside]
        name = "all_gather" if collective.is_gather else "reduce_scatter"
        self._add_exchange(name, collective, awaits)
        if num_beside:
            beside.append(self._num_collectives)
        else:
            self._add_exchange("wait", None, 1)
        self._num_collectives += 1

    def _add_exchange(self, name: str, collective: Collective | None, awaits: int) -> None:
        self._operations.append(
            Operation(name, "", 0.0, 0, False, collective=collective, awaits=awaits)
        )

    def _note_dequantisation(self, func: Any, args: tuple[Any, ...]) -> None:
        """Add what runs inside of a product before the product itself does."""
        if nbytes := dequantisation_bytes(func, args):
            path = "" if is_recomputing() else self._paths[-1]
            self._operations.append(
                Operation("dequantize_4bit", path, 0.0, nbytes, True, self.num_runs)
            )

    def _note_dependencies(
        self,
        func: Any,
        number: int,
        args: tuple[Any, ...],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Add an operation of the one layer whose graph is kept."""
        phase, layer, start = self._segments[-1]
        if phase != FORWARD or self._graph is None or layer != self._graph.layer:
            return
        first_made = self._storages.first_since(start)

        def values_of(tensors: Iterable[torch.Tensor]) -> list[int]:
            found = dict.fromkeys(
                self._value_of(tensor.untyped_storage(), first_made) for tensor in tensors
            )
            return [value for value in found if value is not None]

        written = [
            value
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in values_of(tensors_in((given,)))
        ]
        written += values_of(tensors_in(args[unannotated_writes(func)]))
        reads = values_of(inputs)
        if not torch.is_grad_enabled():
            # As the engine's trace sees it: an unseen kernel may have written whatever is touched.
            self._graph.add_unseen([*reads, *values_of(outputs)])
            return
        makes = [value for value in values_of(outputs) if value not in reads]
        self._graph.add(func, number, reads, list(dict.fromkeys((*written, *makes))))

    def _value_of(self, storage: torch.UntypedStorage, first_made: int | None) -> int | None:
        """Return the graph's number of a storage; None for the host's."""
        assert self._graph is not None
        buffer = self._storages.buffer_in(storage)
        if buffer is None:
            return None
        if buffer < 0 or self._storages.is_gathered(storage):
            return self._graph.value(-1 - storage._cdata, storage.nbytes(), PARAMETER)
        is_made = first_made is not None and buffer >= first_made
        return self._graph.value(buffer, storage.nbytes(), MADE if is_made else INPUT)

    # ---- layers and slots ----------------------------------------------------------------------

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Record that a layer, or a sub-module of it, starts or ends."""
        if not path:
            self._at_layer(layer, phase, is_start=is_start)
        elif is_start:
            self._paths.append(path)
        elif path in self._paths:
            while self._paths.pop() != path:
                pass

    def _at_layer(self, name: str, phase: str, *, is_start: bool) -> None:
        number = self._layer_numbers[name]
        if is_in_backward():
            phase = BACKWARD  # also where a checkpointed layer runs forward again
        if is_start:
            self._segment(phase, number)
        elif phase == FORWARD and number == len(self._layer_names) - 1:
            self._segment(FORWARD, OUTSIDE)
        self._paths = [""]

    def _enter_head(self) -> None:
        phase, layer, _ = self._segments[-1]
        if layer == OUTSIDE and phase == FORWARD and is_in_backward():
            self._segment(BACKWARD, OUTSIDE)

    def _segment(self, phase: str, layer: int) -> None:
        if self._segments[-1][:2] != (phase, layer):
            self._segments.append((phase, layer, self.now))

    def on_pack(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """Record a tensor that autograd saves."""
        number = self._layer_numbers[layer]
        shapes = self._shapes[number]
        shapes.add(tuple(tensor.shape))
        is_statistic = is_row_statistic(tensor, shapes)
        num_values = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._row_values = ROW_STATISTIC if is_statistic else row_length(tensor, num_values)
        if number < NUM_PACKED_LAYERS and self._storages.buffer_in(tensor.untyped_storage()) != -1:
            self._packs.append(Pack(number, path, tensor.nbytes, self.now))
            self._packed_buffers.append(self._storages.buffer_of(tensor))

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Name the buffer that *tensor* lies in."""
        self._labels[self._storages.buffer_of(tensor)] = name

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Record that a slot is saved; later events tell whether it leaves."""
        used = _OpenSlot(slot, stays, self.now)
        used.row_values = self._row_values
        self._open[slot.layer_index, slot.name] = used
        self._slots.append(used)

    def left(self, slot: Slot, source: torch.Tensor, nbytes: int) -> None:
        """Record that a slot was copied to the host."""
        used = self._open[slot.layer_index, slot.name]
        used.source = self._storages.buffer_of(source)
        used.link_bytes = nbytes
        used.left_at = self.now

    def came_back(self, slot: Slot, target: torch.Tensor) -> None:
        """Record that a slot was copied back."""
        used = self._open[slot.layer_index, slot.name]
        used.reloaded = self._storages.buffer_of(target)
        used.unpacked_at = self.now
        used.unpack_rank = self._num_unpacks
        used.is_read_first = self._is_rebuilding
        self._num_unpacks += 1

    def on_unpack(self, slot: Slot) -> None:
        """Record that backward asks for a slot."""
        used = self._open.get((slot.layer_index, slot.name))
        if used is not None and (used.unpacked_at >= 0 or used.is_rebuilt):
            used.asked_again.append(self.now)

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Record that a dropped slot was rebuilt because it was asked for."""
        was_rebuilding = self._is_rebuilding
        self._is_rebuilding |= what == "recompute"
        try:
            result = work()
        finally:
            self._is_rebuilding = was_rebuilding
        used = self._open.get((label.layer_index, label.name)) if isinstance(label, Slot) else None
        if what == "recompute" and used is not None:
            if used.is_rebuilt:
                used.asked_again[-1] = self.now
            else:
                used.is_rebuilt = True
                used.asked_again.append(self.now)
        return result

    # ---- the end -------------------------------------------------------------------------------

    def program(self, resident_bytes: int) -> StepProgram:
        """Return what was seen, with *resident_bytes* there throughout."""
        self._storages.sweep(self.now)
        end = self.now
        starts = [*self._segments, ("", 0, end)]
        segments = [
            Segment(phase, layer, start, starts[number + 1][2])
            for number, (phase, layer, start) in enumerate(self._segments)
        ]
        return StepProgram(
            tuple(self._operations),
            self._storages.buffers(end),
            tuple(used.use() for used in self._slots),
            tuple(segment for segment in segments if segment.start < segment.end),
            resident_bytes,
            self._layer_names,
            self._packs_with_slots(),
            dict(self._labels),
            self._layer_graph(),
            kernels=self._kernels,
            residents=tuple(self._storages.residents),
            forms=self._storages.forms,
        )

    def _packs_with_slots(self) -> tuple[Pack, ...]:
        """Name the slot of each tensor that was saved, by the storage that it lies in."""
        names = {
            (used.slot.layer_index, used.source): used.slot.name
            for used in reversed(self._slots)
            if used.source >= 0
        }
        return tuple(
            pack._replace(slot=names.get((pack.layer, buffer), ""))
            for pack, buffer in zip(self._packs, self._packed_buffers, strict=True)
        )

    def _layer_graph(self) -> LayerGraph | None:
        if self._graph is None:
            return None
        layer = self._graph.layer
        return self._graph.graph(
            {
                used.source: used.slot.name
                for used in reversed(self._slots)  # the first to save a storage names it
                if used.slot.layer_index == layer
            }
        )
