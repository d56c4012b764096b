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
from hf_pyao.engine.transfer.layout import has_storage, view_of_storage
from hf_pyao.engine.weights.converted import ITEMSIZE, ConvertedWeights
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
        converted: the copies that are uploaded in its place; None: it is uploaded as it is stored.
    """

    __slots__ = (
        "block",
        "converted",
        "experts",
        "groups",
        "master",
        "nbytes",
        "offset",
        "size",
        "stand_in",
    )

    def __init__(
        self,
        block: int,
        master: Master,
        offset: int,
        experts: tuple[int, int] | None = None,
        converted: ConvertedWeights | None = None,
    ) -> None:
        self.block = block
        self.master = master
        self.offset = offset
        self.experts = experts
        self.converted = converted
        self.size = master.size
        self.nbytes = self._whole_nbytes
        """Bytes in a slot."""
        if experts is not None:
            num_experts = experts[1] - experts[0]
            self.nbytes = self._whole_nbytes // master.size[0] * num_experts
            self.size = torch.Size((num_experts, *master.size[1:]))
        self.groups: tuple[Weight, ...] = ()
        """The groups that the parameter is divided into: this weight stands for all of them."""
        self.stand_in: Callable[[], torch.Tensor | None] | None = None
        """Returns what is read on the device in place of a parameter of a class of its own, or of
        one that comes in groups."""

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's."""
        return self.master.dtype

    @property
    def slot_dtype(self) -> torch.dtype | None:
        """That of its bytes in a slot; None: it is converted, and autocast was never on yet."""
        return self.dtype if self.converted is None else self.converted.compute.dtype

    @property
    def _whole_nbytes(self) -> int:
        """Bytes that all of the parameter would take in a slot."""
        if self.converted is None:
            return self.master.nbytes
        return self.master.nbytes // self.dtype.itemsize * ITEMSIZE

    @property
    def is_castable(self) -> bool:
        """True if autocast may cast it: it leaves integers and double precision alone."""
        return self.dtype.is_floating_point and self.dtype != torch.float64

    @property
    def name(self) -> str:
        """Qualified name of the parameter."""
        return self.master.name

    @property
    def first_byte(self) -> int:
        """Its first byte in the memory that its upload reads."""
        first = self.master.offset
        if self.converted is not None:
            first = self.converted.offsets[self.master.name]
        if self.experts is None:
            return first
        return first + self.experts[0] * (self._whole_nbytes // self.master.size[0])

    def ref(self) -> torch.Tensor | None:
        """Return the parameter; None once it is gone."""
        return self.master.ref()

    def on_host(self) -> torch.Tensor | None:
        """Return the parameter, or the group of experts in it; None once it is gone."""
        parameter = self.master.ref()
        if parameter is None or self.experts is None:
            return parameter
        return parameter.detach()[self.experts[0] : self.experts[1]]

    def copy_on(
        self, device: torch.device, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Return a copy of a view of the weight, in its stored dtype, with the view's strides.

        Args:
            device: of the copy; the host waits for it.
            size: shape of the view.
            stride: in elements.
            offset: elements from the weight's first one.
        """
        host = self.on_host()
        assert host is not None, f"{self.name!r} is gone"
        host = host.detach()
        if host.stride() == self.master.stride:
            view = host.as_strided(size, stride, int(host.storage_offset()) + offset)
            copied = view.to(device, copy=True)
            if copied.stride() == tuple(stride):
                return copied
        whole = torch.empty_strided(self.size, self.master.stride, dtype=self.dtype, device=device)
        return whole.copy_(host).as_strided(size, stride, offset)

    def is_read_as(self, stand_in: Callable[[], torch.Tensor | None]) -> None:
        """Let :attr:`stand_in` be *stand_in*; None of it: the plain weight is read."""
        self.stand_in = stand_in

    def view_of(self, storage: torch.UntypedStorage, blank: torch.Tensor) -> torch.Tensor:
        """View *storage*, which holds the block from byte 0, as this weight.

        Args:
            storage: the block's bytes.
            blank: an empty tensor of :attr:`slot_dtype`, on the device of *storage*.
        """
        first = self.offset // blank.itemsize
        return view_of_storage(blank, storage, first, self.size, self.master.stride)


class SavedWeight:
    """A weight that autograd has saved, and its version at that time."""

    __slots__ = ("_version", "_weight")

    def __init__(self, weight: Weight) -> None:
        parameter = weight.ref()
        self._weight = weight
        self._version = None if parameter is None else parameter._version

    def check(self) -> None:
        """Check that the weight was not changed in place since, as autograd does.

        Raises:
            SavedTensorModifiedError: it was.
        """
        parameter = self._weight.ref()
        if parameter is not None and parameter._version != self._version:
            raise SavedTensorModifiedError(
                f"{self._weight.name!r} was changed in place between forward and backward, and "
                "backward needs it as it was. Change weights before forward, or after backward.",
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
        converted = masters.converted
        if parts is None and converted is not None:  # those that lie together come together
            names = converted.offsets
            parts = [(m, None) for m in sorted(masters.masters, key=lambda m: m.name in names)]
        self._is_whole = parts is None
        if parts is None:
            self.weights = tuple(Weight(index, each, each.offset) for each in masters.masters)
            end = masters.nbytes
        else:
            self.weights, end = _places_in_slot(index, parts, converted)
        self.nbytes = end
        """Bytes that it takes of a slot."""
        self._by_offset = sorted(self.weights, key=lambda weight: weight.offset)
        self._offsets = [weight.offset for weight in self._by_offset]
        self._seen: tuple[list[tuple[int, int]], list[torch.Tensor]] = ([], [])

    @property
    def memory(self) -> torch.Tensor | None:
        """The memory of its layer on the host."""
        return self.masters.memory

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: first byte in the slot, and uint8 bytes on the host.

        Weights that lie beside each other on the host are one piece.
        """
        stored = self.masters.to_upload()
        for start, source, nbytes, converted in self._ranges():
            memory = stored if converted is None else converted.to_upload(self._own_memory())
            yield start, memory[source : source + nbytes]

    def spans(self, most_bytes: int) -> list[Span]:
        """Return what is read of the file of its layer, *most_bytes* at a time."""
        return [
            span
            for start, source, nbytes, _ in self._ranges()
            for span in spans_of(source, nbytes, start, most_bytes)
        ]

    def _ranges(self) -> Iterator[tuple[int, int, int, ConvertedWeights | None]]:
        """Yield first byte in the slot and on the host, bytes, and the copies if these are read."""
        if self._is_whole:
            yield 0, 0, self.nbytes, None
            return
        start = source = length = 0
        copies: ConvertedWeights | None = None
        for weight in self.weights:
            if weight.slot_dtype is None:
                continue  # who reads it reads the host
            is_beside = weight.first_byte - source == weight.offset - start
            if is_beside and length and copies is weight.converted:
                length = weight.offset - start + weight.nbytes
                continue
            if length:
                yield start, source, length, copies
            start, source, length = weight.offset, weight.first_byte, weight.nbytes
            copies = weight.converted
        if length:
            yield start, source, length, copies

    def _own_memory(self) -> torch.Tensor:
        assert self.memory is not None
        return self.memory

    def note_content(self) -> None:
        """Remember what the weights hold, for :meth:`has_changed`."""
        tensors = self._on_host()
        samples = [] if self.masters.in_file is not None else samples_of(tensors)
        self._seen = (_marks(tensors), samples)

    def follow_changes(self) -> None:
        """Have converted copies made anew if the weights were changed since they were uploaded."""
        if self.masters.converted is not None and self.has_changed():
            self.masters.may_have_changed()

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
    """Return what changes if a parameter is changed in place, or is given other data."""
    return [(each._version, each.data_ptr()) for each in tensors]


def _places_in_slot(
    index: int,
    parts: Sequence[tuple[Master, tuple[int, int] | None]],
    converted: ConvertedWeights | None,
) -> tuple[tuple[Weight, ...], int]:
    """Return the weights of a block one behind the other, and the bytes of that."""
    weights: list[Weight] = []
    end = 0
    for master, experts in parts:
        is_converted = converted is not None and master.name in converted.offsets
        weight = Weight(index, master, 0, experts, converted if is_converted else None)
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
    whole = Weight(weights[0].block, weights[0].master, 0, converted=weights[0].converted)
    whole.groups = tuple(weights)
    return whole
