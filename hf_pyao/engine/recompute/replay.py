"""Replays operations in backward, to rebuild what forward dropped.

Operations run on demand, each once per backward of a layer call: the results are shared by all that
need them. A result goes as soon as no operation still to be replayed reads it and autograd holds no
handle on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch

from hf_pyao.engine.recompute.operations import Kind
from hf_pyao.engine.recompute.trace_values import Operation, Ref, Source, TensorSource, Value
from hf_pyao.engine.recompute.tracing import Trace
from hf_pyao.engine.recompute.verification import ForwardCheck, SecondRuns
from hf_pyao.engine.rerun.modes import reason_of_dispatch_modes, refuse_under
from hf_pyao.engine.rerun.settings import Settings, apply_settings, current_settings
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.saved_tensor import SavedStorage, WatchedStorage
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.transfer.compute_streams import current_stream
from hf_pyao.engine.transfer.layout import TensorLayout, bytes_view
from hf_pyao.errors import PyAOError


class DroppedStorage(WatchedStorage):
    """One distinct storage that a layer call saved and that was dropped, to be rebuilt."""

    def __init__(
        self,
        replay: Replay,
        value: Value,
        call: LayerCall,
        slot: Slot,
        tensor: torch.Tensor,
        layout: TensorLayout,
        check: ForwardCheck | None = None,
    ) -> None:
        """Let go of *tensor*'s storage, which holds *value*; *replay* rebuilds it.

        *check* compares what is rebuilt with what *tensor* holds; None: nothing is compared.
        """
        self.value = value  # first: the destructor asks for it
        self.replay = replay
        self._check = check
        self._noted = None if check is None else check.note(call.fqn, tensor)
        counter = tensor.detach()
        super().__init__(call, slot, value.nbytes, tensor, layout, counter)
        counter.data = layout.blank
        self.home = current_stream(self.device)

    def covers(self, tensor: torch.Tensor, shares_counter: bool) -> bool:
        """Say whether this may stand for *tensor*, on the same storage and of the same version."""
        trace = self.replay.trace
        if trace is None:
            return super().covers(tensor, shares_counter)
        return trace.values.get(tensor.untyped_storage()._cdata) is self.value

    def rebuild(self) -> torch.UntypedStorage:
        """Return its bytes, replaying what is needed and was not replayed yet."""
        storage = self.replay.rebuild(self)
        if self._noted is not None and self._check is not None:
            now = self._check.note_again(self._noted, self.layout.view_of(storage, 0))
            self._check.compare([self._noted], [now])
            self._noted = None
        return storage

    def forget_rebuilt(self) -> None:
        """Let go of what was rebuilt, and of what was brought back for it."""
        self.replay.reset()
        for source in self.replay.sources(self):
            if isinstance(source, SavedStorage):
                source.drop_device_copy()

    def __del__(self) -> None:
        """Let go of the rebuilt bytes, unless another recipe is about to read them."""
        replay = vars(self).get("replay")
        if replay is not None:
            replay.let_go(self.value)


class Replay:
    """The dropped storages of one layer call.

    Args:
        trace: what is seen of the call so far; None once it is over.
        watcher: is told how long replaying takes.
        second_runs: is told of replays that fail.
    """

    def __init__(
        self, trace: Trace | None, watcher: Observer | None, second_runs: SecondRuns
    ) -> None:
        self.trace = trace
        self._watcher = watcher
        self._second_runs = second_runs
        self.dropped: weakref.WeakValueDictionary[Value, DroppedStorage] = (
            weakref.WeakValueDictionary()
        )
        """Those that some graph node may still ask for, by what they hold."""
        # Weak: what no graph node may ask for any more goes, with the stored tensors it would read.
        self.rebuilt: weakref.WeakKeyDictionary[Value, torch.UntypedStorage] = (
            weakref.WeakKeyDictionary()
        )
        self.uses: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        """How many operations still to be replayed read a value."""
        self._is_counted = False

    def forget_trace(self) -> None:
        """Forget the trace: the layer call is over."""
        self.trace = None

    def add(self, record: DroppedStorage) -> None:
        """Take *record* in."""
        self.reset()  # a backward inside of the layer: it did not know of this one
        self.dropped[record.value] = record

    def rebuild(self, record: DroppedStorage) -> torch.UntypedStorage:
        """Return the bytes of *record*, replaying what is needed and was not replayed yet."""
        try:
            if not self._is_counted:
                self._is_counted = True
                self._count_uses()
            value = record.value
            if value not in self.rebuilt:
                run = _Run(self, value, self._watcher, record.slot)
                with self._second_runs.watch(record.slot.layer):
                    if self._watcher is None:
                        run.run_all()
                    else:
                        self._watcher.around("recompute", record.slot, run.run_all)
        except BaseException:
            self.reset()  # half of it was counted or run
            raise
        return self.rebuilt[value]

    def reset(self) -> None:
        """Drop everything that was rebuilt: a retained graph may ask for it again, later."""
        if self._is_counted:
            self._is_counted = False
            for record in self.dropped.values():
                record.forget_handed_out()
            self.uses.clear()
            self.rebuilt.clear()

    def is_needed(self, value: Value) -> bool:
        """Say whether an operation is still to read *value*, or autograd may ask for it."""
        return self.uses.get(value, 0) > 0 or value in self.dropped

    def let_go(self, value: Value) -> None:
        """Let go of what was rebuilt of *value*, unless an operation is to read it.

        Autograd asks for it no more. Where it was the last one, nothing is read any more.
        """
        if len(self.dropped) <= 1:
            self.reset()
        elif self.uses.get(value, 0) <= 0:
            self.rebuilt.pop(value, None)

    def sources(self, record: DroppedStorage) -> list[Source]:
        """Return the stored values that *record* is rebuilt from."""
        found: dict[int, Source] = {}
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
        pending = list(self.dropped)
        while pending:
            value = pending.pop()
            operation = value.producer
            if value.source is not None or operation is None or operation in seen:
                continue
            seen.add(operation)
            for parent in operation.parents:
                self.uses[parent] = self.uses.get(parent, 0) + 1
                pending.append(parent)


def _in_order(target: Value, rebuilt: Container[Value]) -> list[Operation]:
    """Return the operations that lead to *target*, in an order in which they can run."""
    order: dict[Operation, None] = {}
    pending: list[tuple[Value, bool]] = [(target, False)]
    while pending:
        value, is_ready = pending.pop()
        operation = value.producer
        if value.source is not None or value in rebuilt:
            continue
        assert operation is not None
        if is_ready:
            order[operation] = None
        elif operation not in order:
            pending.append((value, True))
            pending.extend((parent, False) for parent in operation.parents)
    return list(order)


class _Run:
    """Runs the operations that lead to one value, as forward ran them."""

    def __init__(
        self, replay: Replay, target: Value, watcher: Observer | None, label: object
    ) -> None:
        self._replay = replay
        self._target = target
        self._watcher = watcher
        self._label = label

    def run_all(self) -> None:
        """Run all that was not run yet."""
        refuse_under(reason_of_dispatch_modes())
        operations = _in_order(self._target, self._replay.rebuilt)
        before, has_grad = current_settings(), torch.is_grad_enabled()
        settings = before
        try:
            torch._C._set_grad_enabled(False)
            # Operations are noted below autocast: their arguments have been cast already.
            # Modes of functions have done to them what they do.
            with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
                for operation in operations:
                    if operation.settings is not settings:
                        apply_settings(settings, operation.settings)
                        settings = operation.settings
                    self._run(operation)
            _restore(before, has_grad)
        except BaseException:
            _restore(before, has_grad)
            raise

    def _run(self, operation: Operation) -> None:
        """Run *operation* and keep those results that are needed."""
        args = [self._thawed(arg) for arg in operation.args[1:]]
        kwargs = {key: self._thawed(arg) for key, arg in operation.kwargs.items()}
        parents = operation.parents
        for parent in parents:
            self._replay.uses[parent] = self._replay.uses.get(parent, 0) - 1
        if operation.args:
            args.insert(0, self._first(operation))
        out = _call(operation, args, kwargs)
        outputs = out if isinstance(out, tuple | list) else (out,)
        for index, ref in operation.outputs:
            value = ref()
            if value is None or not (value is self._target or self._replay.is_needed(value)):
                continue
            storage = outputs[index].untyped_storage()
            if storage.nbytes() != value.nbytes:
                raise PyAOError(
                    f"replaying {operation.func} in {operation.path!r} gave {storage.nbytes()} "
                    f"bytes; forward made {value.nbytes}. Take this sub-module out of "
                    "recompute_modules.",
                    key="recompute-differs",
                )
            self._replay.rebuilt[value] = storage
        for parent in parents:
            if not self._replay.is_needed(parent):
                self._replay.rebuilt.pop(parent, None)

    def _first(self, operation: Operation) -> Any:
        """Return the first argument: one to change if the operation is in place, else as it is."""
        arg = operation.args[0]
        if operation.reads_first:
            if not operation.rule.is_mutable:
                return self._thawed(arg)
            storage, start = self._storage(arg.value)
            if arg.value.source is not None or self._replay.is_needed(arg.value):
                end = arg.value.nbytes - start
                whole = bytes_view(storage, arg.value.device, -start, end)
                storage = whole.clone().untyped_storage()
            return _view(arg, storage)
        if operation.rule.kind is Kind.FILL:
            fresh = torch.empty(arg.value.nbytes, dtype=torch.uint8, device=arg.value.device)
            return _view(arg, fresh.untyped_storage())
        return torch.empty_strided(arg.size, arg.stride, dtype=arg.dtype, device=arg.value.device)

    def _thawed(self, arg: Any) -> Any:
        if type(arg) is Ref:
            source = arg.value.source
            if type(source) is TensorSource:
                return _view_of_source(arg, source)
            return _view(arg, *self._storage(arg.value))
        if type(arg) is list:
            return [self._thawed(item) for item in arg]
        return arg

    def _storage(self, value: Value) -> tuple[torch.UntypedStorage, int]:
        source = value.source
        if source is None:
            return self._replay.rebuilt[value], 0
        if self._watcher is None:
            return source.read()
        return self._watcher.around("restore", self._label, source.read)


def _restore(settings: Settings, has_grad: bool) -> None:
    torch._C._set_grad_enabled(has_grad)
    apply_settings(current_settings(), settings)


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


def _view(ref: Ref, storage: torch.UntypedStorage, start: int = 0) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device=ref.value.device)
    return empty.set_(storage, ref.offset - start // ref.dtype.itemsize, ref.size, ref.stride)


def _view_of_source(ref: Ref, source: TensorSource) -> torch.Tensor:
    """View a tensor that is there anyway; parameters by object, since FSDP moves their bytes."""
    source.check_unmodified()
    tensor = source.tensor.detach()
    offset = tensor.storage_offset() + ref.offset - source.offset
    if ref.dtype == tensor.dtype:
        return tensor.as_strided(ref.size, ref.stride, offset)
    empty = torch.empty(0, dtype=ref.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, ref.size, ref.stride)
