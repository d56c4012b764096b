"""What a trace is made of: values, operations that read and make them, and views of values.

[Note: Values]
A *value* is the content of one storage from one change to the next. Operations take values and make
values; views are no operations but geometry, kept with the argument (:class:`Ref`), so that several
views of a tensor share one rebuilt storage. An operation in place makes a new value of the same
storage: ``_version`` cannot tell them apart, as it still is the old one while a dispatch mode sees
the operation. Neither values nor operations hold tensors, except parameters, buffers and copies of
tiny constants. A buffer that an operation is about to change is copied first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hf_pyao.engine.recompute.operations import Kind, Rule
from hf_pyao.engine.rerun.settings import Settings
from hf_pyao.engine.rerun.versions import version_of
from hf_pyao.engine.transfer.layout import bytes_view, has_storage
from hf_pyao.errors import SavedTensorModifiedError

MAX_COPIED_BYTES = 64
"""Constants up to this size (counters, scales) are copied: they may change at any time."""

MAX_CONSTANT_BYTES = 1024
"""Tensors up to this size that need no gradient are held as they are."""


class Source(Protocol):
    """Where replay finds a value: kept, stored on the host, or there anyway."""

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes, on the device, and which byte of the original storage is the first.

        Raises:
            SavedTensorModifiedError: it was changed in place since it was noted.
        """
        ...

    def survives_a_change(self) -> bool:
        """Get ready for a change of the tensor's memory; say if what is read stays as it is."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class TensorSource:
    """A tensor that is there anyway: a parameter, a buffer, or the copy of a tiny constant."""

    tensor: torch.Tensor
    """The object itself, whose version counter tells of changes."""
    version: int
    offset: int
    """Its storage offset when it was seen: FSDP may place it elsewhere by the time of replay."""
    is_parameter: bool
    is_copy: bool
    """True if it is ours: what becomes of the original does not matter."""
    storage: int
    """Address of its storage object when it was seen."""

    @property
    def is_as_it_was(self) -> bool:
        """False once it was changed in place, or given other data (as FSDP does to parameters)."""
        if version_of(self.tensor) != self.version:
            return False
        return self.is_parameter or self.tensor.untyped_storage()._cdata == self.storage

    def survives_a_change(self) -> bool:
        """Say whether it is ours; a parameter may not be changed, and is looked at when read."""
        return self.is_parameter or self.is_copy

    def check_unmodified(self) -> None:
        """Raise if it is not as it was."""
        if not self.is_as_it_was:
            what = "a parameter" if self.is_parameter else "a buffer"
            raise SavedTensorModifiedError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {what} of shape {tuple(self.tensor.shape)}, from which a "
                "saved tensor is recomputed, was changed after forward, before backward used it. "
                "Run backward before it is changed (by the optimizer's step, say), or do not list "
                "its module in recompute_modules.",
                key="changed-before-second-run",
            )

    def read(self) -> tuple[torch.UntypedStorage, int]:
        """Return its storage."""
        self.check_unmodified()
        return self.tensor.untyped_storage(), 0


class Value:
    """The content of one storage between two changes. See [Note: Values]."""

    __slots__ = (
        "__weakref__",
        "device",
        "is_blocked",
        "is_readable",
        "nbytes",
        "producer",
        "source",
        "tensor",
        "views",
    )

    def __init__(
        self,
        producer: Operation | None,
        nbytes: int,
        device: torch.device,
        tensor: weakref.ref[torch.Tensor],
    ) -> None:
        self.producer = producer
        """What made it; None if that was not seen, or once it is stored."""
        self.nbytes = nbytes
        self.device = device
        self.tensor = tensor
        """A tensor on the storage, while it lives."""
        self.views: tuple[weakref.ref[torch.Tensor], ...] = ()
        """Views that were made of all of it; those that live, and some others."""
        self.is_readable = True
        """False if no tensor holds it: the memory was changed since, or allocated without being
        written (who writes it is not seen)."""
        self.is_blocked = False
        """True if its bytes do not say what it holds (conjugate views)."""
        self.source: Source | None = None
        """Where replay finds it."""

    def live_tensor(self) -> torch.Tensor | None:
        """Return a tensor on the storage; None if none is known that lives."""
        tensor = self.tensor()
        if tensor is None and self.views:
            live = (found for each in self.views if (found := each()) is not None)
            tensor = next(live, None)
        return tensor

    def is_viewed_by(self, view: weakref.ref[torch.Tensor]) -> None:
        """Remember a view that was made of all of it.

        The newest may be the first to go: attention repeats keys by views that no one holds.
        """
        self.views = (*(each for each in self.views if each() is not None), view)

    def overwritten(self) -> None:
        """Mark it unreadable: no tensor holds it any more, or its writer is not known."""
        self.is_readable = False

    def block(self, *, is_readable: bool = True) -> None:
        """Mark that its bytes do not say what it holds; *is_readable*: it has bytes."""
        self.is_blocked = True
        self.is_readable = self.is_readable and is_readable

    def be_like(self, other: Value) -> None:
        """Be as readable as *other*, which had the same memory."""
        self.is_readable, self.is_blocked = other.is_readable, other.is_blocked

    def is_found_in(self, source: Source) -> None:
        """Record where replay finds it."""
        self.source = source

    def is_stored_in(self, source: Source) -> None:
        """Record where replay finds it; how it was made does not matter any more."""
        self.source = source
        self.producer = None


class Ref:
    """A tensor argument: a value and how it was viewed."""

    __slots__ = ("dtype", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        self.value = value
        self.dtype = tensor.dtype
        self.size = tensor.size()
        is_there = has_storage(tensor)
        self.stride = tensor.stride() if is_there else ()
        self.offset = tensor.storage_offset() if is_there else 0

    @property
    def is_whole(self) -> bool:
        """True if the view shows each byte of the storage."""
        return self.size.numel() * self.dtype.itemsize >= self.value.nbytes


class Operation:
    """One operation that was seen. *args* and *kwargs* have :class:`Ref` in place of tensors."""

    __slots__ = (
        "args",
        "func",
        "generator",
        "is_mask",
        "is_repeatable",
        "kwargs",
        "outputs",
        "path",
        "rule",
        "settings",
        "state",
    )

    def __init__(
        self,
        func: Any,
        rule: Rule,
        args: list[Any],
        kwargs: dict[str, Any],
        path: str,
        settings: Settings,
    ) -> None:
        self.func = func
        self.rule = rule
        self.args = args
        self.kwargs = kwargs
        self.path = path
        """Sub-module that ran it; empty for the layer itself."""
        self.settings = settings
        """Those under which it ran; one object for operations that ran under the same."""
        self.outputs: list[tuple[int, weakref.ref[Value]]] = []
        self.generator: torch.Generator | None = None
        self.state: torch.Tensor | None = None
        """Of the generator, before a random operation."""
        self.is_repeatable = True
        """False for a random operation whose generator is not known."""
        self.is_mask = False
        """True if it stands for the mask alone that it draws."""

    def draws_from(self, generator: torch.Generator | None) -> None:
        """Note whose numbers it is about to draw; None: it is not known, and cannot run again."""
        self.generator = generator
        if generator is None:
            self.is_repeatable = False
        else:
            self.state = generator.get_state()

    def mask_alone(self) -> Operation:
        """Return an operation that stands for the mask that this one, a dropout, draws."""
        mask = Operation(self.func, self.rule, self.args, self.kwargs, self.path, self.settings)
        mask.generator, mask.state, mask.is_mask = self.generator, self.state, True
        return mask

    @property
    def refs(self) -> Iterator[Ref]:
        """Yield the tensor arguments."""
        for arg in (*self.args, *self.kwargs.values()):
            if type(arg) is Ref:
                yield arg
            elif type(arg) is list:
                yield from (item for item in arg if type(item) is Ref)

    @property
    def reads_first(self) -> bool:
        """False if the content of the first argument does not matter, only its shape."""
        if self.rule.kind is Kind.FILL:
            return not self.args[0].is_whole
        return not (self.is_mask or self.rule.is_shape_only)

    @property
    def parents(self) -> list[Value]:
        """Return the distinct values whose content a replay reads."""
        refs = self.refs
        if not self.reads_first:
            next(refs)
        return list(dict.fromkeys(ref.value for ref in refs))


def source_of(tensor: torch.Tensor, *, is_parameter: bool = False) -> TensorSource:
    """Return a source that is *tensor* as it is now."""
    offset, storage = int(tensor.storage_offset()), tensor.untyped_storage()._cdata
    return TensorSource(tensor, version_of(tensor), offset, is_parameter, False, storage)


def copied_source(storage: torch.UntypedStorage, device: torch.device) -> TensorSource:
    """Copy the content of *storage* as it is now."""
    whole = bytes_view(storage, device, 0, storage.nbytes()).clone()
    return TensorSource(whole, version_of(whole), 0, False, True, whole.untyped_storage()._cdata)


def hold(value: Value, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Have *value*, a small constant on *storage*, be there in backward."""
    is_tiny = value.nbytes <= MAX_COPIED_BYTES
    value.is_found_in(copied_source(storage, tensor.device) if is_tiny else source_of(tensor))


def unreadable(tensor: torch.Tensor) -> Value:
    """Return a value that cannot be had in backward: sparse and other tensors without strides."""
    value = Value(None, 0, tensor.device, weakref.ref(tensor))
    value.block(is_readable=False)
    return value
