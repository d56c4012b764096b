"""One layer call of a segment, noted so that it can run again: arguments, conditions, state.

[Note: What a layer call is given]
The input of a segment's first layer is held by the engine, which may move it. What a layer made
that runs again before it in the same segment is made again. Everything else (masks, rotary tables,
what an encoder made) is held as it is: other layers hold it too. A cache of keys and values is
noted as [Note: Caches] in ``noted_caches`` describes. A tensor is held without what made it, or it
would hold the graph that holds it; backward goes through the graph of the first run, and asks the
second for values alone, so that its gradients arrive all the same.

[Note: State of layers]
Parameters must not change between the two runs; if one did, that raises. Buffers may: where one
was written in forward or since (statistics of batches, what ranks broadcast), the second run gets
a copy of what the first one found, and what it writes goes there. For all else see [Note: State of
modules] in ``module_state``.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.module_state import ModuleState, NotedParameter, version_of
from hf_pyao.recompute.kept_attention import GivenAttention, KernelCall
from hf_pyao.recompute.noted_caches import Held, NotedCache, is_known_cache
from hf_pyao.recompute.operations import Rules
from hf_pyao.recompute.segment_conditions import Conditions
from hf_pyao.runtime.layer_inputs import tensors_in
from hf_pyao.runtime.saved_tensor import Handle


class SegmentInput(NamedTuple):
    """Stands for the hidden states that the first layer gets."""


class MadeBefore(NamedTuple):
    """Stands for a tensor that a layer of the segment returned."""

    call: int
    """Which one's, in the order of the segment."""
    ordinal: int
    """Which of the tensors that it returned."""


def noted(value: Any, stand_in: Callable[[Tensor], Any]) -> Any:
    """Return *value* with each tensor replaced, in nested tuples, lists and dictionaries too."""
    if isinstance(value, Tensor):
        return stand_in(value)
    if is_known_cache(value):
        return NotedCache(value)
    if isinstance(value, dict):
        return _like(value, {key: noted(item, stand_in) for key, item in value.items()})
    if isinstance(value, UserDict):  # keys and values that layers share, in transformers
        return _with_data(value, noted(value.data, stand_in))
    if isinstance(value, tuple | list):
        return _like(value, [noted(item, stand_in) for item in value])
    return value


def _with_data(value: UserDict[Any, Any], data: dict[Any, Any]) -> UserDict[Any, Any]:
    other = copy.copy(value)
    other.data = data
    return other


def _like(value: Any, items: Any) -> Any:
    """Return *items* as a container of the kind of *value*."""
    kind = type(value)
    if kind in (dict, list, tuple):
        return kind(items)
    if hasattr(value, "_fields"):
        return kind(*items)
    if isinstance(value, tuple):
        return kind(items)
    other = copy.copy(value)  # of a kind of its own: what it knows besides stays
    if isinstance(value, dict):
        for key, item in items.items():
            dict.__setitem__(other, key, item)
    else:
        other[:] = items
    return other


class RecordedCall:
    """A layer call that can run again.

    Args:
        module: the layer.
        name: its qualified name.
        args: what it was called with, tensors replaced by what stands for them.
        kwargs: the same.
        inner_hooks: module hooks of others, before and after the layer's forward, which run where
            what autograd saves is the segment's.
        state: the layer's parameters and buffers.
        devices: accelerators that its tensors are on.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inner_hooks: InnerHooks,
        state: LayerState,
        devices: Iterable[torch.device],
    ) -> None:
        self.module = module
        self.name = name
        self._args = args
        self._kwargs = kwargs
        self._inner_hooks = inner_hooks
        self._state = state.now()
        self._conditions = Conditions(devices)
        self._attention: Sequence[KernelCall | None] = ()
        """What its kernels of attention returned, where that is kept."""

    def changed_argument(self) -> bool:
        """Say whether a tensor that is held was changed in place."""
        held = (each for each in self._stand_ins() if isinstance(each, Held))
        return any(each.version != version_of(each.tensor) for each in held)

    def keeps_attention(self, calls: Sequence[KernelCall | None]) -> None:
        """Take note of its kernels of attention, and of what is kept of them."""
        if any(calls):
            self._attention = calls

    def needs(self) -> set[MadeBefore]:
        """Return what it gets from layers before it in the segment."""
        return {each for each in self._stand_ins() if isinstance(each, MadeBefore)}

    def forward_ended(self) -> None:
        """See whether the layer writes its buffers, and which entries of a cache it reads."""
        for cache in self._caches():
            cache.forward_ended()
        self._state.forward_ended()

    def run(
        self,
        segment_input: Tensor | None,
        made: Mapping[MadeBefore, Tensor],
        while_it_runs: contextlib.AbstractContextManager[Any],
        give: Callable[[Handle], Tensor],
        rules: Rules,
    ) -> list[Tensor]:
        """Run the layer again; return the tensors that it returned.

        Args:
            segment_input: for the segment's first layer.
            made: what it gets from layers before it in the segment.
            while_it_runs: entered around the layer alone.
            give: returns what the engine keeps.
            rules: of operators.

        Raises:
            SavedTensorModifiedError: what it depends on was changed since its first run.
        """
        if self.changed_argument():
            raise SavedTensorModifiedError(
                f"an argument of layer {self.name!r} was changed in place after its forward, and "
                "the layer has to run again in backward (checkpoint_every). Clone the tensor "
                "before changing it, or give checkpoint_every=0."
            )

        def value(stand_in: Any) -> Any:
            if isinstance(stand_in, SegmentInput):
                return segment_input
            if isinstance(stand_in, MadeBefore):
                return made[stand_in]
            if isinstance(stand_in, Held):
                held = stand_in.tensor
                return held.detach().requires_grad_() if stand_in.requires_grad else held
            return stand_in

        args, kwargs = _refilled(self._args, value), _refilled(self._kwargs, value)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._conditions.put_back())
            stack.enter_context(self._state.put_back(self.name))
            stack.enter_context(while_it_runs)
            if self._attention:
                given = GivenAttention(rules, self._attention, give)
                stack.callback(given.stop)
                given.start()
            outputs = self._inner_hooks.run(self.module, args, kwargs)
        return list(tensors_in(outputs))

    def _stand_ins(self) -> Iterator[MadeBefore | Held]:
        for value in self._noted():
            if isinstance(value, NotedCache):
                yield from value.held()
            else:
                yield value

    def _caches(self) -> Iterator[NotedCache]:
        return (value for value in self._noted() if isinstance(value, NotedCache))

    def _noted(self) -> Iterator[MadeBefore | Held | NotedCache]:
        pending: list[Any] = [self._args, self._kwargs]
        while pending:
            value = pending.pop()
            if isinstance(value, Held | MadeBefore | NotedCache):
                yield value
            elif isinstance(value, dict | UserDict):
                pending.extend(value.values())
            elif isinstance(value, tuple | list):
                pending.extend(value)


def _refilled(value: Any, filled: Callable[[Any], Any]) -> Any:
    """Return *value* with what stands for tensors replaced by tensors."""
    if isinstance(value, SegmentInput | MadeBefore | Held):
        return filled(value)
    if isinstance(value, NotedCache):
        return value.refilled(filled)
    if isinstance(value, dict):
        return _like(value, {key: _refilled(item, filled) for key, item in value.items()})
    if isinstance(value, UserDict):
        return _with_data(value, _refilled(value.data, filled))
    if isinstance(value, tuple | list):
        return _like(value, [_refilled(item, filled) for item in value])
    return value


class InnerHooks:
    """Module hooks of others that run between ours and the layer's forward.

    The second run calls ``forward`` alone: hooks that sit around ours, as those of engines that
    gather parameters, have done their part by then.
    """

    def __init__(self, module: nn.Module, is_ours: Callable[[object], bool]) -> None:
        self._before: list[tuple[Callable[..., Any], bool]] = []
        self._after: list[tuple[Callable[..., Any], bool]] = []
        if len(module._forward_pre_hooks) > 1:
            is_inside = False
            for key, hook in module._forward_pre_hooks.items():
                if is_inside:
                    self._before.append((hook, key in module._forward_pre_hooks_with_kwargs))
                is_inside = is_inside or is_ours(hook)
        if len(module._forward_hooks) > 1:
            for key, hook in module._forward_hooks.items():
                if is_ours(hook):
                    break
                self._after.append((hook, key in module._forward_hooks_with_kwargs))
        torchs: Any = module
        self._gives_views = bool(
            torchs._get_backward_hooks()[0] or torchs._get_backward_pre_hooks()
        )
        """True where torch gives the layer views of its arguments, for its backward hooks."""

    def run(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call *module*'s forward as its caller does, with these hooks."""
        for hook, with_kwargs in self._before:
            if with_kwargs:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        if self._gives_views and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            args = tuple(a.view_as(a) if isinstance(a, Parameter) else a for a in args)
        outputs = module.forward(*args, **kwargs)
        for hook, with_kwargs in self._after:
            given = (args, kwargs) if with_kwargs else (args,)
            changed = hook(module, *given, outputs)
            if changed is not None:
                outputs = changed
        return outputs


class _Named(NamedTuple):
    """A buffer where a module has it."""

    home: dict[str, Any]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """What it held, where that may be another thing by the time of backward."""


class LayerState:
    """Knows the modules of a layer, where it has its buffers, and whether these change."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._modules = [weakref.ref(m) for m in modules]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self.is_written = any(isinstance(m, _NormBase) and m.track_running_stats for m in modules)
        """True once a buffer was seen to change: by the layer, or between its calls."""
        self._seen: dict[tuple[int, str], tuple[weakref.ref[Tensor], int]] = {}

    def now(self) -> StateOfCall:
        """Note the state with which a call begins."""
        modules = ModuleState(m for ref in self._modules if (m := ref()) is not None)
        return StateOfCall(self, modules, self._buffers_now() if self._buffers else [])

    def _buffers_now(self) -> list[_Named]:
        is_first = not self._seen
        found = []
        for home in self._buffers:
            for name, tensor in home.items():
                if tensor is None:
                    continue
                key, version = (id(home), name), version_of(tensor)
                seen = self._seen.get(key)
                if seen is not None and (seen[0]() is not tensor or seen[1] != version):
                    self.is_written = True
                self._seen[key] = (weakref.ref(tensor), version)
                found.append(_Named(home, name, tensor, version, None))
        if not (self.is_written or is_first):
            return found
        return [each._replace(copy=each.tensor.detach().clone()) for each in found]


class StateOfCall:
    """A layer's modules and buffers as one of its calls found them."""

    def __init__(self, layer: LayerState, modules: ModuleState, buffers: list[_Named]) -> None:
        self._layer = layer
        self._modules = modules
        self._buffers = buffers

    def forward_ended(self) -> None:
        """See whether the call wrote a buffer.

        Raises:
            SavedTensorModifiedError: it did, as none of the layer's calls had before.
        """
        if not any(map(_is_changed, self._buffers)):
            return
        if any(each.copy is None for each in self._buffers):
            raise SavedTensorModifiedError(
                "a layer that has to run again in backward (checkpoint_every) has written one of "
                "its buffers in forward, as it had not before. Give checkpoint_every=0 for this "
                "model."
            )
        self._layer.is_written = True

    @contextlib.contextmanager
    def put_back(self, layer: str) -> Iterator[None]:
        """Have the layer find the same again, and write nothing but copies.

        Raises:
            SavedTensorModifiedError: a parameter was changed since.
        """
        with self._modules.put_back():
            for each in self._modules.parameters:
                if each.home.get(each.name) is each.tensor and _is_changed(each):
                    raise _changed_since(layer, "parameter", each.name)
            with self._put_back_buffers(layer):
                yield

    @contextlib.contextmanager
    def _put_back_buffers(self, layer: str) -> Iterator[None]:
        changed = [each for each in self._buffers if self._layer.is_written or _is_changed(each)]
        for each in changed:
            if each.copy is None and _is_changed(each):
                raise _changed_since(layer, "buffer", each.name)
        before = [(each, each.home.get(each.name)) for each in changed if each.copy is not None]
        try:
            for each, _ in before:
                assert each.copy is not None
                each.home[each.name] = each.copy.clone()
            yield
        finally:
            for each, tensor in before:
                each.home[each.name] = tensor


def _is_changed(each: _Named | NotedParameter) -> bool:
    return each.home.get(each.name) is not each.tensor or version_of(each.tensor) != each.version


def _changed_since(layer: str, kind: str, name: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        f"{kind} {name!r} of layer {layer!r} was changed in place after the layer's forward, and "
        "the layer has to run again in backward (checkpoint_every). Run backward before the "
        "optimizer steps, or give checkpoint_every=0."
    )


def devices_of(values: Any) -> tuple[torch.device, ...]:
    """Return the accelerators that the tensors in *values* are on."""
    found = {t.device for t in tensors_in(values)}
    return tuple(device for device in found if device.type not in ("cpu", "meta"))
