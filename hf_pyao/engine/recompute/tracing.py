"""Records how the tensors of a layer call are computed, so that they can be dropped and rebuilt.

PyAO traces the operations before a recomputed layer back to activations that are cached (PyAO
paper, sections 4.4 and 5.4). Here a dispatch mode, on for the layer call alone, sees every
operation.

[Note: What is not seen]
Kernels that do not go through torch's dispatcher are invisible: they fill what an ``empty``
allocated, or change a tensor behind our back. They live inside of custom autograd functions, where
gradient mode is off. So any value that an operation touches with gradient mode off, even only to
allocate memory like it, is of unknown origin from then on. So is memory that was allocated without
being written. Such a value can be stored, but not rebuilt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from hf_pyao.engine.recompute.dispatch_modes import RemovableMode
from hf_pyao.engine.recompute.operations import NOTHING, Kind, Rule, Rules, generator_for
from hf_pyao.engine.recompute.trace_values import (
    MAX_CONSTANT_BYTES,
    MAX_COPIED_BYTES,
    Operation,
    Ref,
    Source,
    TensorSource,
    Value,
    copied_source,
    hold,
    source_of,
    unreadable,
)
from hf_pyao.engine.rerun.generators import may_be_disturbed
from hf_pyao.engine.rerun.settings import Settings, current_settings
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.torch_hooks.custom_operators import runner_of
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.transfer.layout import PLAIN_KINDS, has_bytes, has_storage, is_plain

_NUMBERS = frozenset({bool, int, float, complex})


class UnwrappingTensor(torch.Tensor):
    """A tensor whose operations run on plain tensors, which a trace sees in its place."""


class Trace(RemovableMode):
    """What one layer call computed, as far as it can be replayed.

    Args:
        paths: stack of the sub-modules that run, innermost last; kept up to date by the caller.
        product_paths: sub-modules whose matrix products may be replayed.
        is_constant: says of a tensor that no operation made whether it stays on the device in any
            case (a buffer, a parameter's cast); its second argument is the storage's key.
        streamed: returns what gives the bytes of a streamed weight's block again in backward; None
            for other tensors.
        rules: of operators; may be shared by all traces.
        watcher: is told how long operations take, and noting them.
    """

    def __init__(
        self,
        paths: Sequence[str],
        product_paths: frozenset[str],
        is_constant: Callable[[torch.Tensor, int], bool],
        streamed: Callable[[torch.Tensor], Source | None],
        rules: Rules,
        watcher: Observer | None = None,
    ) -> None:
        super().__init__()
        self.values: dict[int, Value] = {}
        self.written: set[int] = set()
        """Storages that operations have changed; by key."""
        self.is_paused = False
        self._settings = current_settings()
        self._paths = paths
        self._product_paths = product_paths
        self._is_constant = is_constant
        self._streamed = streamed
        self._rules = rules
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch not wrap ``__torch_dispatch__``: compiled layers are not traced, and a wrapper
        takes as long as a tenth of all that is noted."""
        return False

    def pause(self) -> None:
        """See no operations until :meth:`go_on`."""
        self.is_paused = True

    def go_on(self) -> None:
        """See operations again."""
        self.is_paused = False

    def close(self) -> None:
        """Forget everything but what recipes hold."""
        values, self.values = self.values, {}
        for key in values:
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        """Let go of the weak references on storages."""
        if "values" in vars(self):  # else an interrupt came as it was made
            self.close()

    # ---- recording -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run *func* and note what it reads and makes."""
        kwargs = kwargs or {}
        own = runner_of(func)
        if types and any(issubclass(kind, UnwrappingTensor) for kind in types):
            return NotImplemented  # torch asks the tensor next, with this mode on
        if self.is_paused:
            return own(*args, **kwargs)
        watcher, path = self._watcher, self._paths[-1]
        if watcher is None:
            return self._note(func, own, types, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            return watcher.around("operation", path, lambda: own(*args, **kwargs))

        return watcher.around("trace", path, lambda: self._note(func, run, types, args, kwargs))

    def _note(
        self,
        func: Any,
        run: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run *func* by calling *run*, and note what it reads and makes."""
        rule = self._rules[func]
        kind = rule.kind
        if args and type(args[0]) in _NUMBERS and rule.takes_tensor:
            # torch makes a number of a tensor that holds one, where a kernel calls another, and
            # then does not take it (seen where zeros without memory are added to).
            args = (torch.tensor(args[0]), *args[1:])
        if not torch.is_grad_enabled() or (types and not _are_plain(types)):
            return self._run_unreplayed(run, rule, args, kwargs, is_seen=False)
        if kind is Kind.VIEW:
            return self._note_view(run(*args, **kwargs))
        if kind is Kind.OPAQUE or kind is Kind.EMPTY:
            return self._run_unreplayed(run, rule, args, kwargs, is_seen=True)
        operation = Operation(
            func,
            rule,
            [self._frozen(arg) for arg in args],
            {key: self._frozen(arg) for key, arg in kwargs.items()} if kwargs else kwargs,
            self._paths[-1],
            self._settings_for(kind),
        )
        if rule.is_mutable:
            self._keep_content(args[0])
        if rule.is_random:
            self._note_state(operation, args, kwargs)
        out = run(*args, **kwargs)
        if rule.is_mutable:
            self._bind(operation, 0, out, is_changed=True)
        elif type(out) is torch.Tensor:
            self._bind(operation, 0, out)
        else:
            self._bind_several(operation, out)
        return out

    def _note_view(self, out: Any) -> Any:
        """Note a view that shows all of a value: the tensor that it was made of may go."""
        if isinstance(out, torch.Tensor) and is_plain(out):
            value = self.values.get(out.untyped_storage()._cdata)
            if value is not None and out.nbytes == value.nbytes:
                value.is_viewed_by(weakref.ref(out))
        return out

    def _settings_for(self, kind: Kind) -> Settings:
        """Return the settings under which an operation runs now.

        Only the default dtype is asked for each time; the others matter where sums are long.
        """
        known = self._settings
        if kind is Kind.PRODUCT or torch.get_default_dtype() is not known[0]:
            now = current_settings()
            if now != known:
                self._settings = now
        return self._settings

    def _bind_several(self, operation: Operation, out: Any) -> None:
        for index, item in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if not isinstance(item, torch.Tensor):
                continue
            if index == 1 and operation.rule.has_mask:
                operation = operation.mask_alone()  # it does not need its input
            self._bind(operation, index, item)

    def _bind(
        self, operation: Operation, index: int, tensor: torch.Tensor, is_changed: bool = False
    ) -> None:
        if not has_storage(tensor):
            return  # what reads it next finds no value, and is not replayed
        storage = tensor.untyped_storage()
        if storage._cdata in self.values:
            if not is_changed:
                return  # an alias of an argument
            key = storage._cdata
            self.values[key].overwritten()
        else:
            key = cast(int, storage._weak_ref())
        # A complex view may be conjugated, which its bytes do not show.
        is_clear = not (tensor.dtype.is_complex or tensor._is_zerotensor())
        producer = operation if is_clear else None
        value = Value(producer, storage.nbytes(), tensor.device, weakref.ref(tensor))
        if not is_clear:
            value.block(is_readable=tensor.dtype.is_complex)
        else:
            operation.outputs.append((index, weakref.ref(value)))
        self.values[key] = value

    def _frozen(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            if not has_storage(arg):
                return Ref(unreadable(arg), arg)
            storage = arg.untyped_storage()
            value = self.values.get(storage._cdata)
            return Ref(self._meet(arg, storage) if value is None else value, arg)
        if type(arg) is list or type(arg) is tuple:
            return [self._frozen(item) for item in arg]
        return arg

    def _meet(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Value:
        """Make the value of a tensor that no operation was seen to make."""
        base = tensor._base
        # The tensor may be a view made for this operation alone; its base lives longer.
        owner = tensor if base is None else base
        value = Value(None, storage.nbytes(), tensor.device, weakref.ref(owner))
        self.values[cast(int, storage._weak_ref())] = value
        if not has_bytes(tensor):
            value.block(is_readable=False)
        elif (block := self._streamed(tensor)) is not None:
            value.is_found_in(block)
        elif isinstance(tensor, Parameter):
            value.is_found_in(source_of(tensor, is_parameter=True))
        elif isinstance(base, Parameter):
            value.is_found_in(source_of(base, is_parameter=True))
        elif value.nbytes <= MAX_CONSTANT_BYTES and not tensor.requires_grad:
            hold(value, owner, storage)
        elif self._is_constant(tensor, storage._cdata):
            # Buffers, and casts of weights: these need gradients, and their graph is not held.
            value.is_found_in(source_of(tensor.detach() if tensor.requires_grad else owner))
        return value

    def _made(self, tensor: torch.Tensor, *, is_constant: bool) -> Value:
        """Make the value of what an operation made that cannot be replayed.

        Its tensor has no gradient yet: autograd marks it after the operation.

        Args:
            tensor: not known so far.
            is_constant: its content is final, and no gradient leads through it.
        """
        storage = tensor.untyped_storage()
        value = Value(None, storage.nbytes(), tensor.device, weakref.ref(tensor))
        self.values[cast(int, storage._weak_ref())] = value
        if not has_bytes(tensor):
            value.block(is_readable=False)
        elif is_constant and value.nbytes <= MAX_CONSTANT_BYTES:
            hold(value, tensor, storage)
        return value

    def _keep_content(self, args: Any) -> None:
        """Keep what recipes read of *args*, which an operation is about to change."""
        for tensor in _traceable(args):
            storage = tensor.untyped_storage()
            self.written.add(storage._cdata)
            known = self.values.get(storage._cdata)
            if known is None or known.source is None or not has_bytes(tensor):
                continue
            if not known.source.survives_a_change():
                known.is_found_in(copied_source(storage, tensor.device))

    def _note_state(self, operation: Operation, args: Any, kwargs: dict[str, Any]) -> None:
        tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if isinstance(tensor, FakeTensor) or not self.may_replay(operation):
            return
        if may_be_disturbed():
            operation.draws_from(None)
            return
        position = operation.rule.dropout_at
        if position is not None:
            probability = args[position] if len(args) > position else kwargs.get("dropout_p")
            if not probability:
                return
        device = torch.device(kwargs.get("device") or "cpu") if tensor is None else tensor.device
        given = next((arg for arg in args if isinstance(arg, torch.Generator)), None)
        operation.draws_from(generator_for(device, kwargs.get("generator") or given))

    def _run_unreplayed(
        self,
        run: Callable[..., Any],
        rule: Rule,
        args: Any,
        kwargs: dict[str, Any],
        *,
        is_seen: bool,
    ) -> Any:
        """Run what cannot be replayed.

        *is_seen*: nothing else happens to its arguments meanwhile; see [Note: What is not seen].
        """
        is_changed = rule.is_mutable or rule.unannotated != NOTHING
        may_copy = not rule.ends_later
        touched = args[rule.unannotated] if is_seen and not rule.is_mutable else (args, kwargs)
        if is_changed:
            self._keep_content(touched)
        out = run(*args, **kwargs)
        for tensor in _traceable(touched):
            self._forget(tensor, is_changed=is_changed, may_copy=may_copy)
        is_empty = rule.kind is Kind.EMPTY
        is_constant = is_seen and not (is_empty or rule.ends_later)
        if is_constant:
            is_constant = not any(each.requires_grad for each in tensors_in((args, kwargs)))
        for tensor in _traceable(out):
            value = self.values.get(tensor.untyped_storage()._cdata)
            if value is None:
                value = self._made(tensor, is_constant=is_constant)
            elif not is_seen:
                value = self._forget(tensor, is_changed=is_changed, may_copy=may_copy)
            if is_seen and is_empty:
                value.overwritten()  # by whom is not seen
            if rule.is_reinterpreting or tensor.dtype.is_complex:
                value.block()
        return out

    def _forget(self, tensor: torch.Tensor, *, is_changed: bool, may_copy: bool = True) -> Value:
        """Make *tensor*'s storage one of unknown origin; return its value.

        *may_copy*: its content is there, and does not change once more.
        """
        storage = tensor.untyped_storage()
        known = self.values.get(storage._cdata)
        if known is None:
            return self._meet(tensor, storage)
        source = known.source
        if type(source) is TensorSource and (source.is_parameter or not is_changed):
            return known
        owner = tensor if tensor._base is None else tensor._base
        value = Value(None, storage.nbytes(), tensor.device, weakref.ref(owner))
        value.be_like(known)
        if is_changed:
            known.overwritten()
            is_small = may_copy and value.nbytes <= MAX_COPIED_BYTES
            if is_small and not tensor.requires_grad and has_bytes(tensor):
                value.is_found_in(copied_source(storage, tensor.device))
        self.values[storage._cdata] = value
        return value

    # ---- asking --------------------------------------------------------------------------------

    def value_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Value:
        """Return the value that *tensor*'s storage holds now."""
        value = self.values.get(storage._cdata)
        return self._meet(tensor, storage) if value is None else value

    def may_replay(self, operation: Operation) -> bool:
        """Say whether *operation* is one to run again in backward."""
        if operation.rule.kind is Kind.PRODUCT and operation.path not in self._product_paths:
            return False
        return operation.is_repeatable


def _traceable(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in *values* whose storages are values of a trace."""
    for tensor in tensors_in(values):
        if is_plain(tensor):
            yield tensor


def _are_plain(types: Any) -> bool:
    return all(kind in PLAIN_KINDS for kind in types)
