"""Bytes of storages: which range of a storage a saved tensor needs, and how payloads are laid out.

Whole storages are copied and views rebuilt over them with their own strides: a copy with other
strides changes the results of matrix products (seen on Phi-3), and several views of one storage
(GPT-2's q, k and v) are then one copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

RANGE_ALIGNMENT_BYTES = 64
"""Byte ranges start at multiples of this, so that rebuilt views keep their alignment."""

WHOLE_STORAGE_FACTOR = 4
"""A view is moved with its whole storage unless the storage is more than this many times larger."""

MAX_LAYOUTS = 4096
"""Layouts that are remembered."""

_STRIDED = torch.strided
_PROXY = torch._C._TorchDispatchModeKey.PROXY

num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many dispatch modes are on. Asked in hot paths before :func:`has_bytes`."""

PLAIN_KINDS = frozenset({torch.Tensor, Parameter, FakeTensor})
"""Types of tensors that are no more than their bytes; of others a copy may lose something."""

_BARE_KINDS = frozenset({torch.Tensor, FakeTensor})
"""Types of tensors whose copies have no type but these."""

PLAIN_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64})
"""The commonest dtypes; tensors of them are neither quantised nor conjugate."""

_BITWISE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64})
"""Dtypes whose elements are copied bit by bit on every device."""


class Stays(str, enum.Enum):
    """Why a saved tensor stays on the device whatever a policy decides; reports count by it.

    The packer decides that (``hf_pyao.engine.runtime.packing``); the bytes' own part of it is
    :func:`reason_not_movable`.
    """

    SUBCLASS = "tensor subclass"
    UNSUPPORTED = "unsupported layout"
    SHARED = "shared by layers"
    EMPTY = "empty"
    ELSEWHERE = "not on the device"
    OTHER_STREAM = "saved on another stream"
    """Than that on which its forward began."""
    DUPLICATE = "equal to another"
    """It is let go of: another one, which was moved, stands for it."""

    __str__ = str.__str__
    __repr__ = str.__repr__


PartPlace = tuple[int, torch.dtype, tuple[int, ...]]
"""Byte offset in the host buffer, dtype and shape of one payload part."""


def has_storage(tensor: torch.Tensor) -> bool:
    """Say whether *tensor*, of whatever class, lies in one storage by sizes and strides.

    Sparse, nested and MKL-DNN tensors do not. What asks a tensor for its storage, its strides, its
    bytes or their equality asks this first.
    """
    return tensor.layout is _STRIDED and not tensor.is_nested


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether *tensor* is no more than elements in a storage: of no class of its own."""
    return type(tensor) in PLAIN_KINDS and has_storage(tensor)


def reason_not_movable(tensor: torch.Tensor) -> Stays | None:
    """Say why *tensor*'s bytes cannot be copied and viewed again, or None if they can.

    Subclasses (FakeTensor apart) may carry meaning that a copy of their bytes loses; conjugate and
    negative bits live outside the storage.
    """
    if type(tensor) not in PLAIN_KINDS:
        return Stays.SUBCLASS
    if (
        not has_storage(tensor)
        or tensor.is_neg()
        or (tensor.dtype not in PLAIN_DTYPES and (tensor.is_quantized or tensor.is_conj()))
    ):
        return Stays.UNSUPPORTED
    return None


def has_bytes(tensor: torch.Tensor) -> bool:
    """Say whether copying *tensor* now copies bytes.

    Forward-mode AD makes zeros whose storage has no memory; to read it would end the process. While
    a graph is traced (``make_fx``, ``torch.func.linearize``), copies would become a part of it.
    """
    if tensor._is_zerotensor():
        return False
    return not num_modes() or torch._C._get_dispatch_mode(_PROXY) is None


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that *tensor* reads, and the byte behind the last."""
    itemsize = tensor.dtype.itemsize
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first * itemsize, first * itemsize
    reach: int = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return first * itemsize, (first + reach + 1) * itemsize


def range_to_move(tensor: torch.Tensor, storage_nbytes: int) -> tuple[int, int]:
    """Return the bytes of the storage to move for *tensor*: all, or a small view's span."""
    if tensor.numel() * tensor.element_size() == storage_nbytes:
        return 0, storage_nbytes
    start, end = byte_span(tensor)
    if storage_nbytes <= WHOLE_STORAGE_FACTOR * (end - start):
        return 0, storage_nbytes
    return start // RANGE_ALIGNMENT_BYTES * RANGE_ALIGNMENT_BYTES, end


class TensorLayout:
    """How a tensor lies in its storage: all that it takes to view the storage so again."""

    __slots__ = (
        "blank",
        "blank_bytes",
        "is_copied_as_it_is",
        "is_dense",
        "nbytes",
        "offset",
        "size",
        "stride",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        self.blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        """An empty tensor of its dtype and device, from which views are made."""
        self.blank_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.size: torch.Size = tensor.size()
        self.stride: tuple[int, ...] = tensor.stride()
        self.offset = int(tensor.storage_offset())
        """In elements."""
        self.nbytes = tensor.numel() * tensor.element_size()
        self.is_dense = _is_dense(self.size, self.stride)
        """True if its elements neither overlap nor leave gaps, in whatever order."""
        self.is_copied_as_it_is = (
            type(tensor) in _BARE_KINDS
            and tensor.dtype in _BITWISE_DTYPES
            and not self.offset
            and self.is_dense
        )
        """True if copying it copies just its bytes, where it is as large as its storage: if its
        elements are dense, in whatever order, and copies keep every bit (those of booleans need
        not). Such a tensor spares two views: of its bytes, and of the bytes that come back."""

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Say whether *tensor*, on the same device, lies so."""
        return bool(
            tensor.size() == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.dtype is self.blank.dtype
        )

    def view_of(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """View *storage*, whose first byte is byte *start* of the original one."""
        offset = self.offset - start // self.blank.itemsize if start else self.offset
        return view_of_storage(self.blank, storage, offset, self.size, self.stride)


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether elements that lie so neither overlap nor leave gaps."""
    expected = 1
    for step, count in sorted(zip(stride, size, strict=True)):
        if count != 1:
            if step != expected:
                return False
            expected *= count
    return True


class Layouts:
    """The layouts seen so far: one object for all tensors that lie alike, told by identity."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], TensorLayout] = {}

    def of(self, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of *tensor*."""
        if type(tensor) is not torch.Tensor:
            return TensorLayout(tensor)
        key = (
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
        )
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()  # lengths that vary without end
            layout = self._known[key] = TensorLayout(tensor)
        return layout


def view_of_storage(
    blank: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """View *storage* as a tensor of *blank*'s dtype and device; *offset* counts elements."""
    if type(blank) is torch.Tensor:
        fresh = blank.new()  # half the time of torch.empty
    else:
        fresh = torch.empty(0, dtype=blank.dtype, device=blank.device)
    return fresh.set_(storage, offset, size, stride)


def bytes_view(
    storage: torch.UntypedStorage, device: torch.device, start: int, end: int
) -> torch.Tensor:
    """View bytes *start* to *end* of *storage* as a flat uint8 tensor; nothing is copied."""
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, start, (end - start,), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its bytes: flat, uint8; nothing is copied."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    start = byte_offset(tensor)
    return bytes_view(tensor.untyped_storage(), tensor.device, start, start + tensor.nbytes)


def rows_view(
    tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, end: int
) -> torch.Tensor | None:
    """View bytes *start* to *end* as (rows, length), rows being *tensor*'s contiguous dimension.

    That is the shape in which codecs choose their scales. None if the range is no whole number of
    elements.
    """
    itemsize = tensor.dtype.itemsize
    count = (end - start) // itemsize
    if not count or count * itemsize != end - start or start % itemsize:
        return None
    length = row_length(tensor, count)
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, start // itemsize, (count // length, length), (length, 1))


def row_length(tensor: torch.Tensor, count: int | None = None) -> int:
    """Return the elements of *tensor*'s contiguous dimension, if it divides *count*, else *count*.

    *count*: None stands for all elements of *tensor*.
    """
    count = tensor.numel() if count is None else count
    length = count
    for size, step in zip(tensor.size(), tensor.stride(), strict=True):
        if step == 1 and size > 1 and count % size == 0:
            length = size
    return length


def byte_offset(tensor: torch.Tensor) -> int:
    """Return where in its storage *tensor* begins, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def place_parts(payload: tuple[torch.Tensor, ...]) -> tuple[tuple[PartPlace, ...], int]:
    """Lay payload parts behind each other, each aligned; return their places and all bytes."""
    offset = 0
    places: list[PartPlace] = []
    for part in payload:
        offset = -(-offset // RANGE_ALIGNMENT_BYTES) * RANGE_ALIGNMENT_BYTES
        places.append((offset, part.dtype, tuple(part.shape)))
        offset += part.nbytes
    return tuple(places), offset


def part_targets(buffer: torch.Tensor, places: tuple[PartPlace, ...]) -> tuple[torch.Tensor, ...]:
    """Return the bytes of *buffer* that each payload part is written to."""
    targets = []
    for offset, dtype, shape in places:
        count = dtype.itemsize
        for size in shape:
            count *= size
        targets.append(buffer[offset : offset + count])
    return tuple(targets)


def parts_view(buffer: torch.Tensor, places: tuple[PartPlace, ...]) -> tuple[torch.Tensor, ...]:
    """View the payload parts inside *buffer* (uint8, flat) again; nothing is copied."""
    return tuple(
        flat.view(dtype).view(shape)
        for flat, (_, dtype, shape) in zip(part_targets(buffer, places), places, strict=True)
    )
