"""Records a training step as a :class:`~hf_pyao.plan.step.step_program.StepProgram`.

A :class:`StepRecorder` hears of the step from the engine, whose observer it is, and from the mode
and the transport of ``recording_mode``. It takes real tensors and fake ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.engine.codecs.row_statistics import is_row_statistic
from hf_pyao.engine.runtime.observer import Observer, Result
from hf_pyao.engine.runtime.policy import Decision
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import is_recomputing
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.engine.transfer.layout import row_length
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.hardware.kernel_workspaces import call_of, workspace_of
from hf_pyao.plan.hardware.operation_costs import cost_of, is_question
from hf_pyao.plan.step.layer_graph import INPUT, MADE, PARAMETER, GraphRecorder, LayerGraph
from hf_pyao.plan.step.ledger import without_cache_for
from hf_pyao.plan.step.step_program import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    ROW_STATISTIC,
    Buffer,
    Operation,
    Pack,
    Resident,
    Segment,
    SlotUse,
    StepProgram,
)

NUM_PACKED_LAYERS = 2
"""Layers of which every saved tensor is noted, those that were saved before too."""


_WITHOUT_MEMORY = -2
"""In place of a buffer, for a storage whose memory was freed and which lives on."""


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


class StepRecorder:
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
        self.observer: Observer = _Listener(self)
        self._kernels = kernels
        self._device = device
        self.is_paused = False
        self.num_runs = 1
        """How often what is seen now is to run, where it is shown once."""
        self._fake_mode = fake_mode
        self._is_host: Callable[[torch.UntypedStorage], bool] = lambda storage: False
        self._layer_names: tuple[str, ...] = ()
        self._layer_numbers: dict[str, int] = {}
        self._operations: list[Operation] = []
        self._births: list[tuple[int, int]] = []
        self._deaths: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        """Weak reference to a storage -> its buffer; -1 for what was there before, and
        :data:`_WITHOUT_MEMORY`."""
        self._gathered: set[int] = set()
        """Storages of parameters that are there for a call, see :meth:`_note_gathered`."""
        self._open: dict[tuple[int, str], _OpenSlot] = {}
        self._slots: list[_OpenSlot] = []
        self._segments: list[tuple[str, int, int]] = [(FORWARD, OUTSIDE, 0)]
        self._num_unpacks = 0
        self._packs: list[Pack] = []
        self._packed_buffers: list[int] = []
        self._shapes: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        """Of what each layer saves."""
        self._row_values = 0
        """Of what is being saved, see :class:`SlotUse`."""
        self._labels: dict[int, str] = {}
        self._residents: list[Resident] = []
        self._paths: list[str] = [""]
        self._graph: GraphRecorder | None = None
        self._free_weak_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref

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
        self._is_host = is_host

    # ---- storages ------------------------------------------------------------------------------

    def note_residents(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Record what is there before the step; return its bytes.

        Args:
            tensors: of the model, by qualified name; one with several names under each of them.
        """
        numbers: dict[int, int] = {}
        for name, tensor in tensors:
            if self._is_elsewhere(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive[cast(int, storage._weak_ref())] = -1
                # As `model/weights/streamable.py` has it; vectors stay.
                is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
                is_streamable = is_frozen and tensor.dim() > 1
                layer = self._layer_of(name)
                numbers[storage._cdata] = len(self._residents)
                self._residents.append(Resident(layer, storage.nbytes(), is_streamable))
            elif tensor.nbytes == storage.nbytes() and storage._cdata in numbers:
                known = self._residents[numbers[storage._cdata]]
                self._residents[numbers[storage._cdata]] = known._replace(
                    num_names=known.num_names + 1
                )
        return sum(each.nbytes for each in self._residents)

    def note_held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record what is there before the step and may go in it, as from its first operation on."""
        for storage in self._new_storages(tensors):
            self._alive[cast(int, storage._weak_ref())] = len(self._births)
            self._births.append((storage.nbytes(), 0))

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
        self._sweep()
        with without_cache_for(self._fake_mode, func):
            result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        cost = cost_of(func, args, kwargs, result, tensors_in((args, kwargs)), outputs)
        self._enter_head()
        self._note_gathered(tensors_in((args, kwargs)))
        made = self._new_storages(outputs)
        if cost is None and not made:
            return result  # a view, or the host's
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
            )
        )
        for storage in made:
            self._alive[cast(int, storage._weak_ref())] = len(self._births)
            self._births.append((storage.nbytes(), number))
        self._note_dependencies(func, number, args, kwargs, outputs)
        return result

    def _note_dependencies(
        self, func: Any, number: int, args: Any, kwargs: Any, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Add an operation of the one layer whose graph is kept."""
        phase, layer, start = self._segments[-1]
        if phase != FORWARD or self._graph is None or layer != self._graph.layer:
            return
        first_made = next((n for n, (_, birth) in enumerate(self._births) if birth >= start), None)

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
        reads = values_of(tensors_in((args, kwargs)))
        if not torch.is_grad_enabled():
            # As the engine's trace sees it: an unseen kernel may have written whatever is touched.
            self._graph.add_unseen([*reads, *values_of(outputs)])
            return
        makes = [value for value in values_of(outputs) if value not in reads]
        self._graph.add(func, number, reads, list(dict.fromkeys((*written, *makes))))

    def _note_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note parameters that are gathered for a call: they are there again when it runs again."""
        for tensor in tensors:
            if isinstance(tensor, torch.nn.Parameter):
                self._gathered.add(tensor.untyped_storage()._cdata)

    def _value_of(self, storage: torch.UntypedStorage, first_made: int | None) -> int | None:
        """Return the graph's number of a storage; None for the host's."""
        assert self._graph is not None
        buffer = self._alive.get(storage._cdata)
        if buffer is None:
            return None
        if buffer < 0 or storage._cdata in self._gathered:
            return self._graph.value(-1 - storage._cdata, storage.nbytes(), PARAMETER)
        is_made = first_made is not None and buffer >= first_made
        return self._graph.value(buffer, storage.nbytes(), MADE if is_made else INPUT)

    def _new_storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Return the device's storages among those of *tensors* that were not seen before.

        Those without bytes do not count: the engine makes many, to put storages into.
        """
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if self._is_elsewhere(tensor):
                continue
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in self._alive and storage.nbytes() > 0
            if is_new and not self._is_host(storage):
                found[storage._cdata] = storage
        return list(found.values())

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return self._device is not None and tensor.device.type != self._device.type

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was given other memory, or none: the buffer in it ends."""
        buffer = self._alive.get(storage._cdata)
        if buffer is None and self._fake_mode is not None and storage.device.type == "meta":
            self._alive[cast(int, storage._weak_ref())] = buffer = _WITHOUT_MEMORY
        if buffer is None or buffer == -1:
            return  # another thread's, or there before the step
        nbytes = storage.nbytes()
        if buffer != _WITHOUT_MEMORY:
            self._deaths[buffer] = self.now
        self._alive[storage._cdata] = len(self._births) if nbytes else _WITHOUT_MEMORY
        if nbytes:
            self._births.append((nbytes, self.now))

    def buffer_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the buffer that *tensor* lies in; -1 if it was there before."""
        return self._alive.get(tensor.untyped_storage()._cdata, -1)

    def _sweep(self) -> None:
        """Record which storages have been freed."""
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._alive if expired(key)]:
            buffer = self._alive.pop(key)
            self._gathered.discard(key)
            if buffer >= 0:
                self._deaths[buffer] = self.now
            self._free_weak_ref(key)

    def __del__(self) -> None:
        """Let go of the weak references."""
        for key in self._alive:
            self._free_weak_ref(key)

    # ---- layers and slots ----------------------------------------------------------------------

    def layer(self, name: str, phase: str, *, is_start: bool) -> None:
        """Record that a layer starts or ends."""
        number = self._layer_numbers[name]
        if is_in_backward():
            phase = BACKWARD  # also where a checkpointed layer runs forward again
        if is_start:
            self._segment(phase, number)
        elif phase == FORWARD and number == len(self._layer_names) - 1:
            self._segment(FORWARD, OUTSIDE)
        self._paths = [""]

    def module(self, path: str, *, is_start: bool) -> None:
        """Record that a sub-module of the layer starts or ends."""
        if is_start:
            self._paths.append(path)
        elif path in self._paths:
            while self._paths.pop() != path:
                pass

    def _enter_head(self) -> None:
        phase, layer, _ = self._segments[-1]
        if layer == OUTSIDE and phase == FORWARD and is_in_backward():
            self._segment(BACKWARD, OUTSIDE)

    def _segment(self, phase: str, layer: int) -> None:
        if self._segments[-1][:2] != (phase, layer):
            self._segments.append((phase, layer, self.now))

    def packed(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """Record a tensor that autograd saves."""
        number = self._layer_numbers[layer]
        shapes = self._shapes[number]
        shapes.add(tuple(tensor.shape))
        is_statistic = is_row_statistic(tensor, shapes)
        num_values = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._row_values = ROW_STATISTIC if is_statistic else row_length(tensor, num_values)
        if number < NUM_PACKED_LAYERS and self._alive.get(tensor.untyped_storage()._cdata) != -1:
            self._packs.append(Pack(number, path, tensor.nbytes, self.now))
            self._packed_buffers.append(self.buffer_of(tensor))

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Name the buffer that *tensor* lies in."""
        self._labels[self.buffer_of(tensor)] = name

    def saved(self, slot: Slot, stays: str | None) -> None:
        """Record that a slot is saved; later events tell whether it leaves."""
        used = _OpenSlot(slot, stays, self.now)
        used.row_values = self._row_values
        self._open[slot.layer_index, slot.name] = used
        self._slots.append(used)

    def left(self, slot: Slot, source: torch.Tensor, nbytes: int) -> None:
        """Record that a slot was copied to the host."""
        used = self._open[slot.layer_index, slot.name]
        used.source = self.buffer_of(source)
        used.link_bytes = nbytes
        used.left_at = self.now

    def came_back(self, slot: Slot, target: torch.Tensor) -> None:
        """Record that a slot was copied back."""
        used = self._open[slot.layer_index, slot.name]
        used.reloaded = self.buffer_of(target)
        used.unpacked_at = self.now
        used.unpack_rank = self._num_unpacks
        self._num_unpacks += 1

    def asked_for(self, slot: Slot) -> None:
        """Record that backward asks for a slot."""
        used = self._open.get((slot.layer_index, slot.name))
        if used is not None and (used.unpacked_at >= 0 or used.is_rebuilt):
            used.asked_again.append(self.now)

    def rebuilt(self, slot: Slot) -> None:
        """Record that a dropped slot was rebuilt because it was asked for."""
        used = self._open.get((slot.layer_index, slot.name))
        if used is None:
            return
        if used.is_rebuilt:
            used.asked_again[-1] = self.now
        else:
            used.is_rebuilt = True
            used.asked_again.append(self.now)

    # ---- the end -------------------------------------------------------------------------------

    def program(self, resident_bytes: int) -> StepProgram:
        """Return what was seen, with *resident_bytes* there throughout."""
        self._sweep()
        end = self.now
        buffers = [
            Buffer(nbytes, birth, self._deaths.get(number, end))
            for number, (nbytes, birth) in enumerate(self._births)
        ]
        starts = [*self._segments, ("", 0, end)]
        segments = [
            Segment(phase, layer, start, starts[number + 1][2])
            for number, (phase, layer, start) in enumerate(self._segments)
        ]
        slots = [
            SlotUse(
                used.slot.name,
                used.slot.layer_index,
                used.slot.nbytes,
                used.link_bytes,
                used.stays,
                used.source,
                used.packed_at,
                used.left_at,
                used.reloaded,
                used.unpacked_at,
                tuple(used.asked_again),
                used.unpack_rank,
                used.row_values,
            )
            for used in self._slots
        ]
        return StepProgram(
            tuple(self._operations),
            tuple(buffers),
            tuple(slots),
            tuple(segment for segment in segments if segment.start < segment.end),
            resident_bytes,
            self._layer_names,
            self._packs_with_slots(),
            dict(self._labels),
            self._layer_graph(),
            kernels=self._kernels,
            residents=tuple(self._residents),
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


class _Listener(Observer):
    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Record it."""
        if path:
            self._recorder.module(path, is_start=is_start)
        else:
            self._recorder.layer(layer, phase, is_start=is_start)

    def on_pack(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """Record it."""
        self._recorder.packed(layer, path, tensor)

    def on_unpack(self, slot: Slot) -> None:
        """Record it."""
        self._recorder.asked_for(slot)

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Record what was rebuilt."""
        result = work()
        if what == "recompute" and isinstance(label, Slot):
            self._recorder.rebuilt(label)
        return result

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Record it."""
        self._recorder.saved(slot, stays)
