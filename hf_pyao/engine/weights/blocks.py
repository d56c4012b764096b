"""Blocks: what one upload brings to the device, into one slot.

A block is the streamed weights of one layer. Where the layer has fused experts (parameters whose
first dimension counts experts), it has several: one of all other weights, and one of each group of
experts. So a slot need not be as large as all experts of a layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_pyao.engine.rerun.weight_samples import have_changed, samples_of
from hf_pyao.engine.transfer.layout import TensorLayout, has_storage, view_of_storage
from hf_pyao.engine.weights.host_bytes import ALIGNMENT_BYTES, aligned
from hf_pyao.engine.weights.master import Master
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.on_disk import Span, spans_of
from hf_pyao.errors import ConflictError, SavedTensorModifiedError


@dataclass(frozen=True)
class ExpertGroups:
    """Parameters of one layer that are divided into groups of experts.

    Args:
        names: of the parameters, which have one number of experts as their first dimension. A block
            has a group of each.
        group_size: experts of a group; the last group may have fewer.
    """

    names: tuple[str, ...]
    group_size: int


class Weight:
    """One streamed parameter, or a group of its experts: its place in a block.

    Args:
        block: number of the block.
        master: the whole parameter on the host.
        offset: first byte in the block's slot.
        experts: the first of the group, and the one behind its last; None for all.
    """

    __slots__ = ("block", "experts", "groups", "master", "nbytes", "offset", "size")

    def __init__(
        self,
        block: int,
        master: Master,
        offset: int,
        experts: tuple[int, int] | None = None,
    ) -> None:
        self.block = block
        self.master = master
        self.offset = offset
        self.experts = experts
        self.size = master.size
        self.nbytes = master.nbytes
        """Bytes on the device."""
        if experts is not None:
            num_experts = experts[1] - experts[0]
            self.nbytes = master.nbytes // master.size[0] * num_experts
            self.size = torch.Size((num_experts, *master.size[1:]))
        self.groups: tuple[Weight, ...] = ()
        """The groups that the parameter is divided into: this weight stands for all of them."""

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's."""
        return self.master.dtype

    @property
    def name(self) -> str:
        """Qualified name of the parameter."""
        return self.master.name

    @property
    def first_byte(self) -> int:
        """Its first byte in the memory that its upload reads."""
        first = self.master.offset
        if self.experts is None:
            return first
        return first + self.experts[0] * (self.master.nbytes // self.master.size[0])

    def ref(self) -> torch.Tensor | None:
        """Return the parameter; None once it is gone."""
        return self.master.ref()

    def on_host(self) -> torch.Tensor | None:
        """Return the parameter, or the group of experts in it; None once it is gone."""
        parameter = self.master.ref()
        if parameter is None or self.experts is None:
            return parameter
        return parameter.detach()[self.experts[0] : self.experts[1]]

    def view_of(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """View *storage* on *device*, which holds the block from byte 0, as this weight."""
        blank = torch.empty(0, dtype=self.dtype, device=device)
        first = self.offset // blank.itemsize
        return view_of_storage(blank, storage, first, self.size, self.master.stride)


class SavedView:
    """Gives a view of a weight again that autograd has saved.

    Args:
        weight: as it is now.
        layout: of the view.
        storage: returns the storage of its block, with its bytes.
    """

    __slots__ = ("_layout", "_seen", "_storage", "_weight")

    def __init__(
        self, weight: Weight, layout: TensorLayout, storage: Callable[[], torch.UntypedStorage]
    ) -> None:
        self._weight = weight
        self._layout = layout
        self._storage = storage
        self._seen = _marks_of(weight.ref())

    def __call__(self) -> torch.Tensor:
        """Return the view.

        Raises:
            SavedTensorModifiedError: the weight was changed since, in place or by other data.
        """
        _check_unchanged(self._weight, self._seen)
        return self._layout.view_of(self._storage(), 0)


class SavedBlock:
    """Gives the bytes of a block again, for what backward recomputes from its weights.

    Args:
        weights: all of the block, as they are now.
        storage: as :class:`SavedView` takes it.
    """

    def __init__(
        self, weights: Sequence[Weight], storage: Callable[[], torch.UntypedStorage]
    ) -> None:
        self._seen = [(weight, _marks_of(weight.ref())) for weight in weights]
        self._storage = storage

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return the storage, with its bytes, and 0: it begins with the first one.

        Raises:
            SavedTensorModifiedError: a weight was changed since, in place or by other data.
        """
        for weight, marks in self._seen:
            _check_unchanged(weight, marks)
        return self._storage(), 0

    def survives_a_change(self) -> bool:
        """Return True: what is read is looked at then."""
        return True


def _check_unchanged(weight: Weight, marks: tuple[int, int]) -> None:
    parameter = weight.ref()
    if parameter is not None and _marks_of(parameter) != marks:
        raise SavedTensorModifiedError(
            f"{weight.name!r} was changed between forward and backward, and backward "
            "needs it as it was. Change weights before forward, or after backward.",
            key="streamed-weight-changed",
        )


class Block:
    """Weights of one layer that come to the device together.

    Args:
        index: its number among the blocks, in forward order.
        masters: the weights of its layer on the host.
        parts: parameters of the layer, or groups of experts of them; None for all parameters.
    """

    def __init__(
        self,
        index: int,
        masters: Masters,
        parts: Sequence[tuple[Master, tuple[int, int] | None]] | None = None,
    ) -> None:
        self.index = index
        self.masters = masters
        self.layer = masters.layer
        self._is_whole = parts is None
        if parts is None:
            self.weights = tuple(Weight(index, each, each.offset) for each in masters.masters)
            end = masters.nbytes
        else:
            self.weights, end = _places_in_slot(index, parts)
        self.nbytes = end
        """Bytes that it takes of a slot."""
        self._by_offset = sorted(self.weights, key=lambda weight: weight.offset)
        self._offsets = [weight.offset for weight in self._by_offset]
        self._seen: tuple[list[tuple[int, int]], list[torch.Tensor]] = ([], [])
        self._spans: list[Span] = []

    @property
    def memory(self) -> torch.Tensor | None:
        """The memory of its layer on the host."""
        return self.masters.memory

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: first byte in the slot, and uint8 bytes on the host.

        Weights that lie beside each other on the host are one piece.
        """
        memory = self.masters.to_upload()
        for start, source, nbytes in self._ranges():
            yield start, memory[source : source + nbytes]

    def spans(self, most_bytes: int) -> Sequence[Span]:
        """Return what is read of the file of its layer, *most_bytes* at a time."""
        if not self._spans:
            self._spans = [
                span
                for start, source, nbytes in self._ranges()
                for span in spans_of(source, nbytes, start, most_bytes)
            ]
        return self._spans

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield first byte on the device and on the host, and bytes, of what lies together."""
        if self._is_whole:
            yield 0, 0, self.nbytes
            return
        start = source = length = 0
        for weight in self.weights:
            if length and weight.first_byte - source == weight.offset - start:
                length = weight.offset - start + weight.nbytes
                continue
            if length:
                yield start, source, length
            start, source, length = weight.offset, weight.first_byte, weight.nbytes
        if length:
            yield start, source, length

    def note_content(self) -> None:
        """Remember what the weights hold, for :meth:`has_changed`."""
        tensors = self._on_host()
        samples = [] if self.masters.in_file is not None else samples_of(tensors)
        self._seen = (_marks(tensors), samples)

    def has_changed(self) -> bool:
        """Say whether the weights on the host were changed since :meth:`note_content`.

        By :meth:`has_new_marks`; writes through ``.data`` leave none, and are known by a few
        elements, or by the system for weights in a file.
        """
        if self.has_new_marks():
            return True
        if self.masters.in_file is not None:
            return self.masters.in_file.was_written()
        return have_changed(self._on_host(), self._seen[1])

    def has_new_marks(self) -> bool:
        """Say whether versions or addresses have changed since :meth:`note_content`."""
        return self._seen[0] != _marks(self._on_host())

    def strays(self) -> list[tuple[Weight, torch.Tensor]]:
        """Return weights whose parameter was given other data, which are not in the layer's memory.

        Raises:
            ConflictError: the data have another dtype, shape or layout.
        """
        assert self.memory is not None
        first = self.memory.data_ptr()
        found = []
        for weight in self.weights:
            parameter = weight.ref()
            if parameter is None:
                continue
            is_there = has_storage(parameter) and parameter.dtype == weight.dtype
            is_there = is_there and parameter.size() == weight.master.size
            if not is_there:
                raise ConflictError(
                    f"{weight.name!r} was given data of dtype {parameter.dtype} and shape "
                    f"{tuple(parameter.size())}; it is streamed as {weight.dtype}, "
                    f"{tuple(weight.master.size)}. Detach, and attach again.",
                    key="streamed-weight-replaced",
                )
            is_moved = parameter.data_ptr() != first + weight.master.offset
            if is_moved or parameter.stride() != weight.master.stride:
                tensor = weight.on_host()
                assert tensor is not None
                found.append((weight, tensor))
        return found

    def weight_at(self, offset: int) -> Weight:
        """Return the weight that byte *offset* of the slot belongs to."""
        return self._by_offset[bisect_right(self._offsets, offset) - 1]

    def _on_host(self) -> list[torch.Tensor]:
        return [tensor for weight in self.weights if (tensor := weight.on_host()) is not None]


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [_marks_of(each) for each in tensors]


def _marks_of(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return what changes if a parameter is changed in place, or is given other data."""
    return (0, 0) if tensor is None else (tensor._version, tensor.data_ptr())


def _places_in_slot(
    index: int,
    parts: Sequence[tuple[Master, tuple[int, int] | None]],
) -> tuple[tuple[Weight, ...], int]:
    """Return the weights of a block one behind the other, and the bytes of that."""
    weights: list[Weight] = []
    end = 0
    for master, experts in parts:
        weight = Weight(index, master, 0, experts)
        # The place within 512 bytes is that on the host: results depend on it.
        weight.offset = end + weight.first_byte % ALIGNMENT_BYTES
        weights.append(weight)
        end = aligned(weight.offset + weight.nbytes)
    return tuple(weights), end


def blocks_of(masters: Masters, first: int, divided: Sequence[ExpertGroups] = ()) -> list[Block]:
    """Return the blocks of a layer, in the order in which its forward is taken to read them.

    Args:
        masters: the layer's weights.
        first: number of the first block.
        divided: which parameters come in groups of experts, in the order in which they are read.
    """
    if not divided:
        return [Block(first, masters)]
    by_name = {master.name: master for master in masters.masters}
    in_groups = {name for groups in divided for name in groups.names}
    rest = [(master, None) for master in masters.masters if master.name not in in_groups]
    blocks = [Block(first, masters, rest)] if rest else []
    for groups in divided:
        together = [by_name[name] for name in groups.names]
        num_experts = together[0].size[0]
        for start in range(0, num_experts, groups.group_size):
            experts = start, min(start + groups.group_size, num_experts)
            parts = [(master, experts) for master in together]
            blocks.append(Block(first + len(blocks), masters, parts))
    return blocks


def weights_by_parameter(blocks: Sequence[Block]) -> dict[int, Weight]:
    """Return the streamed parameters of *blocks*, by ``id``.

    Of a parameter that comes in groups, the weight has :attr:`Weight.groups`.
    """
    groups: dict[int, list[Weight]] = {}
    for block in blocks:
        for weight in block.weights:
            if (parameter := weight.ref()) is not None:
                groups.setdefault(id(parameter), []).append(weight)
    return {key: _whole(weights) for key, weights in groups.items()}


def _whole(weights: Sequence[Weight]) -> Weight:
    if weights[0].experts is None:
        return weights[0]
    whole = Weight(weights[0].block, weights[0].master, 0)
    whole.groups = tuple(weights)
    return whole
