"""One layer call of a segment, noted so that it can run again: arguments, conditions, state.

[Note: What a layer call is given]
The input of a segment's first layer is held by the engine, which may move it. What a layer made
that runs again before it in the same segment is made again. Everything else (masks, rotary tables,
what an encoder made) is held as it is: other layers hold it too. A cache of keys and values is
noted as [Note: Caches] in ``noted_caches`` describes. A tensor is held without what made it, or it
would hold the graph that holds it; backward goes through the graph of the first run, and asks the
second for values alone, so that its gradients arrive all the same.

A layer that is given an object of a user's own, which may change, runs once. What the second run
finds in the layer is in [Note: State of modules] in ``rerun.module_state``.
"""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_pyao.engine.recompute.inner_hooks import InnerHooks
from hf_pyao.engine.recompute.kept_attention import GivenAttention, KernelCall
from hf_pyao.engine.recompute.noted_caches import Held, NotedCache, hold, is_known_cache
from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.rerun.generators import accelerators_in
from hf_pyao.engine.rerun.guard import is_looked_into
from hf_pyao.engine.rerun.module_state import StateOfCall
from hf_pyao.engine.rerun.surroundings import Surroundings
from hf_pyao.engine.rerun.versions import version_of
from hf_pyao.engine.runtime.saved_tensor import Handle
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.errors import SavedTensorModifiedError


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
    if type(value) is dict:
        return _like(value, {key: noted(item, stand_in) for key, item in value.items()})
    if isinstance(value, UserDict):  # keys and values that layers share, in transformers
        return _with_data(value, noted(value.data, stand_in))
    if isinstance(value, tuple) or type(value) is list:
        return _like(value, [noted(item, stand_in) for item in value])
    return value


def _with_data(value: UserDict[Any, Any], data: dict[Any, Any]) -> UserDict[Any, Any]:
    other = copy.copy(value)
    other.data = data
    return other


def objects_in(values: Any) -> list[object]:
    """Return the objects in *values* that may change, apart from tensors and plain containers."""
    found: list[object] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, UserDict) or is_known_cache(value):
            continue
        if isinstance(value, tuple) or type(value) in (dict, list):
            pending.extend(value.values() if isinstance(value, dict) else value)
        elif is_looked_into(value):
            found.append(value)
    return found


def _like(value: Any, items: Any) -> Any:
    """Return *items* as a container of the kind of *value*."""
    kind = type(value)
    return kind(*items) if hasattr(value, "_fields") else kind(items)


class RecordedCall:
    """A layer call that can run again.

    Args:
        module: the layer.
        name: its qualified name.
        args: what it was called with, tensors replaced by what stands for them.
        kwargs: the same.
        inner_hooks: module hooks of others, before and after the layer's forward, which run where
            what autograd saves is the segment's.
        state: that of the layer and of its arguments, as the call begins.
        devices: accelerators that its tensors are on.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inner_hooks: InnerHooks,
        state: StateOfCall,
        devices: Iterable[torch.device],
    ) -> None:
        self.module = module
        self.name = name
        self._args = args
        self._kwargs = kwargs
        self._inner_hooks = inner_hooks
        self._state = state
        self._surroundings = Surroundings(devices)
        self._attention: Sequence[KernelCall | None] = ()
        """What its kernels of attention returned, where that is kept."""

    def changed_argument(self) -> bool:
        """Say whether a tensor that is held was changed in place."""
        held = (each for each in self._stand_ins() if isinstance(each, Held))
        return any(each.version != version_of(each.tensor) for each in held)

    def keeps_attention(self, calls: Sequence[KernelCall | None]) -> None:
        """Remember its kernels of attention, and what is kept of them."""
        if any(calls):
            self._attention = calls

    def needs(self) -> set[MadeBefore]:
        """Return what it gets from layers before it in the segment."""
        return {each for each in self._stand_ins() if isinstance(each, MadeBefore)}

    def reason_not_again(self) -> str:
        """Return why what its forward has changed cannot be put back, or an empty string.

        It is seen, too, which entries of a cache the forward reads.
        """
        for cache in self._caches():
            cache.forward_ended()
        return self._state.reason_not_again() or self._surroundings.reason_not_again()

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
                "before changing it, or give checkpoint_every=0.",
                key="changed-before-second-run",
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
            stack.enter_context(self._surroundings.put_back())
            stack.enter_context(self._state.put_back())
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


def record_call(
    module: nn.Module,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: StateOfCall,
    hidden: Tensor | None,
    made_by: Callable[[Tensor], MadeBefore | None],
    is_ours: Callable[[object], bool],
    devices: Iterable[torch.device],
) -> RecordedCall:
    """Return what *module* needs to run again with these arguments.

    Args:
        module: the layer.
        name: its qualified name.
        args: what it is called with.
        kwargs: the same.
        state: what the call has found.
        hidden: the segment's input, if the layer is its first.
        made_by: says which layer of the segment returned a tensor.
        is_ours: says which module hooks are this lifecycle's.
        devices: accelerators that its tensors are on.
    """

    def stand_in(tensor: Tensor) -> SegmentInput | MadeBefore | Held:
        if tensor is hidden:
            return SegmentInput()
        return made_by(tensor) or hold(tensor)

    return RecordedCall(
        module,
        name,
        noted(args, stand_in),
        noted(kwargs, stand_in),
        InnerHooks(module, is_ours),
        state,
        devices,
    )


def devices_of(values: Any) -> tuple[torch.device, ...]:
    """Return the accelerators that the tensors in *values* are on."""
    return accelerators_in(tensor.device for tensor in tensors_in(values))
