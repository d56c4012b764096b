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
import functools
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

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


def mapped(value: Any, replaced: Callable[[Any], Any]) -> Any:
    """Return *value* with each part replaced, in nested tuples, lists and dictionaries too.

    Args:
        value: what a layer is given.
        replaced: returns what takes the place of a part; the very part where it is to be entered
            if it is a container, and to stay if it is none.
    """
    new = replaced(value)
    if new is not value:
        return new
    kind = type(value)
    if kind is dict:
        return {key: mapped(item, replaced) for key, item in value.items()}
    if isinstance(value, UserDict):  # keys and values that layers share, in transformers
        other = copy.copy(value)
        other.data = mapped(value.data, replaced)
        return other
    if kind is list or isinstance(value, tuple):
        items = [mapped(item, replaced) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value


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


class RecordedCall:
    """A layer call that can run again.

    Args:
        module: the layer.
        name: its qualified name.
        args: what it is called with.
        kwargs: the same.
        state: that of the layer, as the call begins.
        made_here: returns what stands for a tensor that the segment has; None for other tensors.
        is_ours: says which module hooks are this lifecycle's. Those of others, before and after the
            layer's forward, run where what autograd saves is the segment's.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateOfCall,
        made_here: Callable[[Tensor], SegmentInput | MadeBefore | None],
        is_ours: Callable[[object], bool],
    ) -> None:
        self.name = name
        self.needs: set[MadeBefore] = set()
        """What it gets from layers before it in the segment."""
        self.devices = accelerators_in(each.device for each in tensors_in((args, kwargs)))
        """Accelerators that its tensors are on."""
        self._module = module
        self._held: list[Held] = []
        self._caches: list[NotedCache] = []
        self._given = mapped((args, kwargs), functools.partial(self._noted, made_here))
        self._inner_hooks = InnerHooks(module, is_ours)
        self._state = state
        self._surroundings = Surroundings(self.devices)
        self._attention: Sequence[KernelCall | None] = ()
        """What its kernels of attention returned, where that is kept."""

    def _noted(
        self, made_here: Callable[[Tensor], SegmentInput | MadeBefore | None], value: Any
    ) -> Any:
        """Return what stands for a tensor or a cache that it is given."""
        if isinstance(value, Tensor):
            known = made_here(value)
            if isinstance(known, MadeBefore):
                self.needs.add(known)
            if known is not None:
                return known
            self._held.append(hold(value))
            return self._held[-1]
        if is_known_cache(value):
            self._caches.append(NotedCache(value))
            return self._caches[-1]
        return value

    def changed_argument(self) -> bool:
        """Say whether a tensor that is held was changed in place."""
        of_caches = chain.from_iterable(cache.held() for cache in self._caches)
        held = chain(self._held, of_caches)
        return any(each.version != version_of(each.tensor) for each in held)

    def keeps_attention(self, calls: Sequence[KernelCall | None]) -> None:
        """Remember its kernels of attention, and what is kept of them."""
        if any(calls):
            self._attention = calls

    def reason_not_again(self) -> str:
        """Return why what its forward has changed cannot be put back, or an empty string.

        It is seen, too, which entries of a cache the forward reads.
        """
        for cache in self._caches:
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

        def filled(value: Any) -> Any:
            if isinstance(value, SegmentInput):
                return segment_input
            if isinstance(value, MadeBefore):
                return made[value]
            return value.again() if isinstance(value, Held | NotedCache) else value

        args, kwargs = mapped(self._given, filled)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._surroundings.put_back())
            stack.enter_context(self._state.put_back())
            stack.enter_context(while_it_runs)
            if self._attention:
                given = GivenAttention(rules, self._attention, give)
                stack.callback(given.stop)
                given.start()
            outputs = self._inner_hooks.run(self._module, args, kwargs)
        return list(tensors_in(outputs))
