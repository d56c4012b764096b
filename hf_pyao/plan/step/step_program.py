"""A training step as plain numbers: its operations, the memory they take, and what autograd saves.

A :class:`StepProgram` is recorded once (``step_recorder``) while everything that can leave the
device does so at once and comes back when it is asked for. Each saved tensor is then there twice,
with a hole between: as the buffer that forward made, and as the one that backward gets. What a plan
does with it (``predict``) is to close the hole, or to move its edges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy

from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.hardware.kernel_workspaces import KernelCall, workspace_of
from hf_pyao.plan.step.layer_graph import LayerGraph
from hf_pyao.plan.step.streamed_blocks import NOTHING_STREAMED, StreamedBlocks

FORWARD = "forward"
BACKWARD = "backward"

OUTSIDE = -1
"""Layer of what is in none."""

READ_BY_ROWS, READ_WHOLE = 1, 2
"""How frozen weights of embeddings, and those of the head, are read where they are on the host."""

ROW_STATISTIC = 1
"""Values of a row of what holds one number for each row of another tensor."""


class WeightRead(NamedTuple):
    """A frozen weight that an operation reads, in a layer that has fused experts."""

    experts: int
    """As :attr:`Resident.experts`; 0: a weight that is none of fused experts."""
    first: int = 0
    """First of the experts that are read."""
    last: int = 0
    """The one behind the last of them."""
    is_backward: bool = False
    """The operation belongs to backward itself, not to a second run of forward. Its groups of
    experts come in reverse order."""


class Collective(NamedTuple):
    """What an operation exchanges with other devices, beside compute."""

    nbytes: int
    """What a device receives for it over the interconnect, by a ring."""
    is_gather: bool
    """True: it needs nothing that the step computes, and may run ahead of compute. False: it
    starts behind what compute has queued before: a reduction, or a gather on compute's own stream.
    """


class Operation(NamedTuple):
    """One operation of the step, in order."""

    name: str
    path: str
    """Sub-module of the layer that ran it; empty for the layer itself, or outside of layers."""
    flops: float
    traffic_bytes: int
    """What it reads and writes."""
    is_kernel: bool
    """False if nothing runs on the device: views, empty tensors."""
    num_runs: int = 1
    """How often it runs, where one stands for others that leave memory as it was."""
    workspace_bytes: int = 0
    """What its kernel allocates inside and frees before it returns, beside its results; see
    ``hf_pyao/plan/hardware/kernel_workspaces.py``."""
    call: KernelCall | None = None
    """The sizes that :attr:`workspace_bytes` follows from; None for what allocates nothing."""
    reads: WeightRead | None = None
    """The frozen weight that it reads, in a layer with fused experts; None elsewhere."""
    collective: Collective | None = None
    """What it exchanges with other devices; it takes no compute then. None for all others."""
    awaits: int = 0
    """Which collective compute waits for before it: 1 is the newest that was queued, 2 the one
    before; 0: none."""


class Buffer(NamedTuple):
    """A storage, from the operation that makes it until it is let go."""

    nbytes: int
    birth: int
    """Operation after which it is there."""
    death: int
    """First operation after which it is no longer there; the number of operations if it stays."""


class BufferTable(NamedTuple):
    """Buffers of a step as columns of 64-bit integers, for arithmetic over all of them at once.

    The first three have an entry for each buffer.
    """

    nbytes: numpy.ndarray
    births: numpy.ndarray
    deaths: numpy.ndarray
    workspaces: numpy.ndarray
    """Numbers of the operations whose kernels allocate inside."""
    workspace_bytes: numpy.ndarray
    """What each of them allocates."""

    @classmethod
    def of(cls, buffers: Sequence[Buffer], operations: Sequence[Operation]) -> BufferTable:
        """Return the table of a step."""
        columns = numpy.fromiter(chain.from_iterable(buffers), numpy.int64).reshape(-1, 3).T
        inside = [(n, each.workspace_bytes) for n, each in enumerate(operations)]
        found = numpy.array([each for each in inside if each[1]], dtype=numpy.int64).reshape(-1, 2)
        return cls(columns[0], columns[1], columns[2], found[:, 0], found[:, 1])

    def with_buffers(self, buffers: Mapping[int, Buffer]) -> BufferTable:
        """Return the table with other buffers in place of those of these numbers, or behind all."""
        if not buffers:
            return self
        size = max(len(self.nbytes), max(buffers) + 1)
        numbers = list(buffers)
        columns = []
        values = numpy.fromiter(chain.from_iterable(buffers.values()), numpy.int64)
        for before, there in zip(self[:3], values.reshape(-1, 3).T, strict=True):
            column = numpy.empty(size, dtype=numpy.int64)
            column[: len(before)] = before
            column[numbers] = there
            columns.append(column)
        return self._replace(nbytes=columns[0], births=columns[1], deaths=columns[2])


class SlotUse(NamedTuple):
    """A slot of a layer call, with the moments in which it is saved and asked for."""

    name: str
    """As :attr:`hf_pyao.engine.runtime.slots.Slot.name`."""
    layer: int
    nbytes: int
    """What autograd would keep alive for it."""
    link_bytes: int
    """What crosses the link for it, each way; 0 if it stays."""
    stays: str | None
    """Why it stays in any case; None if it can leave."""
    source: int
    """The buffer that holds it in forward; -1 if that was there before the step."""
    packed_at: int
    """Number of operations before it is saved."""
    left_at: int
    """Number of operations before its copy is queued: the end of the layer, where what is saved is
    a part of its storage with gaps."""
    reloaded: int
    """The buffer that backward gets; -1 if it stays, or was not asked for."""
    unpacked_at: int
    """Number of operations before it is asked for; -1 if it was not."""
    asked_again: tuple[int, ...] = ()
    """The same, for each time after the first. Of a slot that is recomputed: when it was there
    again, each time that it was asked for."""
    unpack_rank: int = 0
    """Orders those that are asked for at the same moment."""
    row_values: int = 0
    """Elements of a row, which codecs give one scale: the contiguous dimension of what was saved;
    0 if that is not known; :data:`ROW_STATISTIC` for what no lossy codec takes."""
    is_read_first: bool = False
    """True if it is asked for first to rebuild another slot, not by autograd."""


class Pack(NamedTuple):
    """A tensor that autograd saves in a layer, whether it was saved before or not."""

    layer: int
    path: str
    """The sub-module that ran."""
    nbytes: int
    """Of the tensor."""
    at: int
    """Number of operations before it."""
    slot: str = ""
    """The slot that it is saved as, now or before."""


class Resident(NamedTuple):
    """A weight or buffer of the model, there throughout."""

    layer: int
    """The layer that has it; :data:`OUTSIDE` for what is in none."""
    nbytes: int
    is_streamable: bool = False
    """True for a frozen parameter that may be streamed, where a layer has it, and for the scales
    of one that is quantised."""
    num_names: int = 1
    """Names that the model has it under: 2 for an embedding that is tied to the head. Where a model
    is built on the device, each was a tensor of its own before they were tied."""
    experts: int = 0
    """Of a weight of fused experts: a number from 1 on, which weights of its layer share whose
    groups of experts come together. 0 for all others."""
    num_experts: int = 0
    """Of a weight of fused experts: how many it has, as its first dimension."""
    end: int = 0
    """Of a frozen weight of embeddings or head, which may be on the host: :data:`READ_BY_ROWS`, or
    :data:`READ_WHOLE` where the head has it. 0 for all others."""


class Segment(NamedTuple):
    """A part of the step: before the layers, a layer's forward, the head, a layer's backward."""

    phase: str
    """:data:`FORWARD` or :data:`BACKWARD`."""
    layer: int
    """Position of the layer in forward order; :data:`OUTSIDE` for what is in none."""
    start: int
    """Its first operation."""
    end: int
    """The first one that is no longer its own."""


@dataclass(frozen=True)
class StepProgram:
    """A whole step: forward, loss and backward of one micro-batch."""

    operations: Sequence[Operation]
    buffers: Sequence[Buffer]
    slots: Sequence[SlotUse]
    """In the order of packing."""
    segments: Sequence[Segment]
    """In order, without gaps."""
    resident_bytes: int
    """What is there throughout: weights, buffers, optimizer states on the device."""
    layer_names: tuple[str, ...]
    """Qualified names of the layers, in forward order."""
    packs: Sequence[Pack] = ()
    """What autograd saves in the first two layers, without parameters, in order."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Names of buffers that have one of their own."""
    graph: LayerGraph | None = None
    """What depends on what in one layer's forward; None at sizes that were not recorded."""
    num_tiles: int = 0
    """Tiles that MLPs ran in; 0: they ran whole."""
    num_tiled_tokens: int = 0
    """Tokens that were cut into as many tiles."""
    kernels: KernelSettings = ANY_DEVICE
    """The device and the process that workspaces of kernels are computed for."""
    residents: Sequence[Resident] = ()
    """The model's own part of :attr:`resident_bytes`, tensor by tensor; empty if it is not known.
    The rest are states of an optimizer, and gradients."""
    streamed: StreamedBlocks = NOTHING_STREAMED
    """Layers whose frozen weights are uploaded for forward and again for backward. They are not in
    :attr:`residents`, and the slots that they are uploaded into are."""

    optimizer_requests: Sequence[int] | None = None
    """What the optimizer's step allocates beside gradients and states, and frees: see
    :func:`~hf_pyao.plan.hardware.beside_step.optimizer_requests`. None: it is not on the device, or
    not known."""
    holds_gradients: bool = False
    """Gradients of an earlier micro-batch are among :attr:`resident_bytes`."""

    forms: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Dtype and shape of the tensors that buffers were made as, such as ``bfloat16[8, 512]``. Not
    known of steps that were read from a document, or computed from other sizes."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_names)

    @property
    def num_operations(self) -> int:
        """Operations of the step."""
        return len(self.operations)

    @cached_property
    def table(self) -> BufferTable:
        """Its buffers as columns."""
        return BufferTable.of(self.buffers, self.operations)

    def with_kernels(self, kernels: KernelSettings) -> StepProgram:
        """Return the step with what its kernels allocate inside on another device."""
        if kernels == self.kernels:
            return self
        operations = tuple(
            each._replace(workspace_bytes=workspace_of(each.call, kernels))
            for each in self.operations
        )
        return dataclasses.replace(self, operations=operations, kernels=kernels)

    def segment_of(self, operation: int) -> Segment:
        """Return the part of the step that *operation* is in."""
        for segment in self.segments:
            if segment.start <= operation < segment.end:
                return segment
        return self.segments[-1]

    def name_of(self, buffer: int) -> str:
        """Name a buffer by the slot that it holds, or by the operation that made it."""
        if buffer in self.labels:
            return self.labels[buffer]
        for slot in self.slots:
            if buffer in (slot.source, slot.reloaded):
                return f"{self.layer_names[slot.layer]} {slot.name}"
        birth = self.buffers[buffer].birth
        segment, operation = self.segment_of(birth), self.operations[birth]
        where = self.layer_names[segment.layer] if segment.layer != OUTSIDE else "outside of layers"
        return " ".join(
            filter(None, (where, operation.path, f"({operation.name}, {segment.phase})"))
        )
