"""Replays operations in backward, to rebuild what forward dropped.

Operations run on demand, each once per backward of a layer call: the results are shared by all that
need them. A result goes as soon as no operation still to be replayed reads it and autograd holds no
handle on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_pyao.errors import PyAOError, SavedTensorModifiedError
from hf_pyao.runtime.layout import bytes_view
from hf_pyao.runtime.numeric_settings import Settings, apply_settings, current_settings
from hf_pyao.runtime.operations import Kind
from hf_pyao.runtime.recompute import RecomputedStorage
from hf_pyao.runtime.values import Operation, Ref, TensorSource, Value

StorageOf = Callable[[Any], tuple[torch.UntypedStorage, int]]
"""Brings a stored value (its source) to the device; returns its bytes, and which byte of the
original storage is the first of them."""


class Replay:
    """The dropped storages of one layer call."""

    def __init__(self) -> None:
        self._slots: list[weakref.ref[RecomputedStorage]] = []
        self._is_counted = False
        self.stream: torch.Stream | None = None
        """The compute stream on which all of it is rebuilt; None on a CPU, or before the first."""

    def add(self, record: RecomputedStorage) -> None:
        """Take *record* in."""
        self.reset()  # a backward inside of the layer: it did not know of this one
        self._slots.append(weakref.ref(record))

    def live_slots(self) -> list[RecomputedStorage]:
        """Return the dropped storages that some graph node may still ask for."""
        return [record for ref in self._slots if (record := ref()) is not None]

    def rebuild(self, record: RecomputedStorage, storage_of: StorageOf) -> torch.UntypedStorage:
        """Return the bytes of *record*, replaying what is needed and was not replayed yet."""
        try:
            if not self._is_counted:
                self._is_counted = True
                self._count_uses()
            value = record.value
            if value.rebuilt is None:
                _run_all(_in_order(value), value, storage_of)
        except BaseException:
            self.reset()  # half of it was counted or run
            raise
        assert value.rebuilt is not None
        return value.rebuilt

    def reset(self) -> None:
        """Drop everything that was rebuilt: a retained graph may ask for it again, later."""
        if not self._is_counted:
            return
        self._is_counted = False
        slots = self.live_slots()
        for record in slots:
            record.forget_handed_out()
            if record.home is not None:
                record.home.await_visitors()
        pending = [record.value for record in slots]
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            value.uses = 0
            value.rebuilt = None
            if value.producer is not None:
                pending.extend(value.producer.parents)

    def sources(self, record: RecomputedStorage) -> list[Any]:
        """Return the stored values that *record* is rebuilt from."""
        found: dict[int, Any] = {}
        pending, seen = [record.value], {record.value}
        while pending:
            value = pending.pop()
            if value.source is not None:
                found[id(value.source)] = value.source
            elif value.producer is not None:
                fresh = [parent for parent in value.producer.parents if parent not in seen]
                seen.update(fresh)
                pending.extend(fresh)
        return list(found.values())

    def _count_uses(self) -> None:
        """Count, for every value on the way to a slot, the operations that will read it."""
        seen: set[Operation] = set()
        pending = [record.value for record in self.live_slots()]
        while pending:
            value = pending.pop()
            operation = value.producer
            if value.source is not None or operation is None or operation in seen:
                continue
            seen.add(operation)
            for parent in operation.parents:
                parent.uses += 1
                pending.append(parent)


def _in_order(target: Value) -> list[Operation]:
    """Return the operations that lead to *target*, in an order in which they can run."""
    order: dict[Operation, None] = {}
    pending: list[tuple[Value, bool]] = [(target, False)]
    while pending:
        value, is_ready = pending.pop()
        operation = value.producer
        if value.source is not None or value.rebuilt is not None:
            continue
        assert operation is not None
        if is_ready:
            order[operation] = None
        elif operation not in order:
            pending.append((value, True))
            pending.extend((parent, False) for parent in operation.parents)
    return list(order)


def _run_all(operations: list[Operation], target: Value, storage_of: StorageOf) -> None:
    """Run *operations* as forward ran them."""
    before, has_grad = current_settings(), torch.is_grad_enabled()
    settings = before
    try:
        torch._C._set_grad_enabled(False)
        # Operations are noted below autocast: their arguments have been cast already.
        with torch._C._DisableAutocast():
            for operation in operations:
                if operation.settings is not settings:
                    apply_settings(settings, operation.settings)
                    settings = operation.settings
                _run(operation, target, storage_of)
        _restore(before, has_grad)
    except BaseException:
        _restore(before, has_grad)
        raise


def _restore(settings: Settings, has_grad: bool) -> None:
    torch._C._set_grad_enabled(has_grad)
    apply_settings(current_settings(), settings)


def _run(operation: Operation, target: Value, storage_of: StorageOf) -> None:
    """Run *operation* and keep those results that are needed."""
    args = [_thawed(arg, storage_of) for arg in operation.args[1:]]
    kwargs = {key: _thawed(arg, storage_of) for key, arg in operation.kwargs.items()}
    parents = operation.parents
    for parent in parents:
        parent.uses -= 1
    if operation.args:
        args.insert(0, _first(operation, parents, storage_of))
    out = _call(operation, args, kwargs)
    outputs = out if isinstance(out, tuple | list) else (out,)
    for index, ref in operation.outputs:
        value = ref()
        if value is None or not (value is target or value.uses > 0 or _is_saved(value)):
            continue
        storage = outputs[index].untyped_storage()
        if storage.nbytes() != value.nbytes:
            raise PyAOError(
                f"replaying {operation.func} in {operation.path!r} gave {storage.nbytes()} bytes; "
                f"forward made {value.nbytes}. Take this sub-module out of recompute_modules."
            )
        value.rebuilt = storage
    for parent in parents:
        if parent.uses <= 0 and not _is_saved(parent):
            parent.rebuilt = None


def _call(operation: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    generator = operation.generator
    if generator is None or operation.state is None:
        return operation.func(*args, **kwargs)
    now = generator.get_state()
    try:
        generator.set_state(operation.state)
        return operation.func(*args, **kwargs)
    finally:
        generator.set_state(now)


def _first(operation: Operation, parents: list[Value], storage_of: StorageOf) -> Any:
    """Return the first argument: one to change if the operation is in place, else as it is."""
    arg = operation.args[0]
    if operation.reads_first:
        if not operation.rule.is_mutable:
            return _thawed(arg, storage_of)
        storage, start = _storage(arg.value, storage_of)
        if arg.value.source is not None or arg.value.uses > 0 or _is_saved(arg.value):
            end = arg.value.nbytes - start
            whole = bytes_view(storage, arg.value.device, -start, end)
            storage = whole.clone().untyped_storage()
        return _view(arg, storage)
    if operation.rule.kind is Kind.FILL:
        fresh = torch.empty(arg.value.nbytes, dtype=torch.uint8, device=arg.value.device)
        return _view(arg, fresh.untyped_storage())
    return torch.empty_strided(arg.size, arg.stride, dtype=arg.dtype, device=arg.value.device)


def _thawed(arg: Any, storage_of: StorageOf) -> Any:
    if type(arg) is Ref:
        source = arg.value.source
        if type(source) is TensorSource:
            return _view_of_source(arg, source)
        return _view(arg, *_storage(arg.value, storage_of))
    if type(arg) is list:
        return [_thawed(item, storage_of) for item in arg]
    return arg


def _storage(value: Value, storage_of: StorageOf) -> tuple[torch.UntypedStorage, int]:
    if type(value.source) is TensorSource:
        _check_source(value.source)
        return value.source.tensor.untyped_storage(), 0
    if value.source is not None:
        return storage_of(value.source)
    assert value.rebuilt is not None
    return value.rebuilt, 0


def _view(ref: Ref, storage: torch.UntypedStorage, start: int = 0) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device=ref.value.device)
    return empty.set_(storage, ref.offset - start // ref.dtype.itemsize, ref.size, ref.stride)


def _view_of_source(ref: Ref, source: TensorSource) -> torch.Tensor:
    """View a tensor that is there anyway; parameters by object, since FSDP moves their bytes."""
    _check_source(source)
    tensor = source.tensor.detach()
    offset = tensor.storage_offset() + ref.offset - source.offset
    if ref.dtype == tensor.dtype:
        return tensor.as_strided(ref.size, ref.stride, offset)
    empty = torch.empty(0, dtype=ref.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, ref.size, ref.stride)


def _check_source(source: TensorSource) -> None:
    if not source.is_as_it_was:
        what = "a parameter" if source.is_parameter else "a buffer"
        raise SavedTensorModifiedError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} of shape {tuple(source.tensor.shape)}, from which a saved tensor "
            "is recomputed, was changed after forward, before backward used it. Run backward "
            "before it is changed (by the optimizer's step, say), or do not list its module in "
            "recompute_modules."
        )


def _is_saved(value: Value) -> bool:
    """Say whether autograd holds a handle on what *value* rebuilds."""
    return value.slot is not None and value.slot() is not None
