"""What stands for the tensors of layers that run again, and how a second run fills it.

Which layers run, and when, is in ``segments``: see [Note: Segments].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.recompute.verification import FarEnoughError, ForwardCheck, Noted
from hf_pyao.engine.rerun.versions import version_of
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import Pack, pack_hook, pop_hooks, push_hooks
from hf_pyao.engine.transfer.graph_task import NO_TASK
from hf_pyao.errors import RecomputationError

Meta = tuple[torch.Size, torch.dtype, torch.device]
"""What a tensor must have in common with the one that it stands in for."""

Streamed = Callable[[Tensor], StreamedTensor | None]
"""Returns what stands for a view of a streamed weight; None for other tensors."""


class Part:
    """Consecutive layer calls of a segment whose tensors are there at once.

    Args:
        start: which of the segment's calls comes first.
    """

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self.place_holders: list[weakref.ref[PlaceHolder]] = []
        """For what its calls save, in order."""
        self.metas: list[Meta] = []
        self.noted: list[Noted] = []
        """What is known of the bits of what its calls save, where the forward is checked."""

    def reach_to(self, stop: int) -> None:
        """Have the calls up to before *stop*, one more than before."""
        self.stop = stop

    def pack(self, layer: str, tensor: Tensor, check: ForwardCheck | None) -> PlaceHolder:
        """Return what stands for *tensor*, which its call of *layer* saves."""
        if check is not None:
            self.noted.append(check.note(layer, tensor))
        self.metas.append((tensor.shape, tensor.dtype, tensor.device))
        return self.hold(tensor)

    def hold(self, tensor: Tensor) -> PlaceHolder:
        """Return what stands for *tensor*, of which nothing is noted: its call runs once."""
        place_holder = PlaceHolder(self, tensor.detach())
        self.place_holders.append(weakref.ref(place_holder))
        return place_holder

    def taken_off(self, start: int) -> list[PlaceHolder]:
        """Take those of its place holders off that come from number *start* on; return the living.

        They are of its last call, which is not to run again.
        """
        refs = self.place_holders[start:]
        del self.place_holders[start:], self.metas[start:], self.noted[start:]
        self.stop -= 1
        return [place_holder for ref in refs if (place_holder := ref()) is not None]

    def forget(self, *, is_used_only: bool) -> bool:
        """Let go of what its place holders hold; say whether they hold more, not yet used."""
        holds_more = False
        for ref in self.place_holders:
            place_holder = ref()
            if place_holder is None:
                continue
            if is_used_only and not place_holder.is_used:
                holds_more = True
            else:
                place_holder.clear()
        return holds_more


class PlaceHolder:
    """Stands for a tensor that autograd saves in *part* of a segment.

    One that stands for a parameter is not among those of the part, and holds it to its end.
    """

    __slots__ = ("__weakref__", "give", "is_used", "part", "task", "tensor", "version")

    def __init__(self, part: Part, tensor: Tensor) -> None:
        self.part = part
        self.give: Callable[[], Tensor] | None = None
        """Returns the tensor of a call that is not to run again."""
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)
        """That of the tensor when it was put here."""
        self.task = NO_TASK
        """The backward pass that the tensor was made for; none if it is forward's own."""
        self.is_used = False
        """True once backward got the tensor that it has now."""

    def fill(self, tensor: Tensor, task: int) -> None:
        """Hold *tensor* for the backward pass that is graph task *task*."""
        self.version = version_of(tensor)
        self.task = task
        self.is_used = False
        self.tensor = tensor

    def clear(self) -> None:
        """Let go of the tensor."""
        self.tensor = None

    def use(self) -> Tensor:
        """Return the tensor that it holds, for backward."""
        assert self.tensor is not None
        self.is_used = True
        return self.tensor

    def keep(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Give up the second run of its call: *keep* takes forward's tensor, which is still held.

        It returns what gives the tensor back. A tensor that was changed stays: reading it raises.
        """
        assert self.tensor is not None
        if version_of(self.tensor) == self.version:
            self.give = keep(self.tensor)
            self.tensor = None


# ---- the second run ------------------------------------------------------------------------------


class AllCollectedError(FarEnoughError):
    """Ends a second run early: what it would still save is asked for by no one."""

    def __init__(self, collector: Collector) -> None:
        super().__init__("a segment of layers has run far enough")
        self.collector = collector


class Collector:
    """Gets what the layers of *part* save as they run again, and fills the place holders that live.

    Args:
        name: of its layers, for messages.
        part: has the place holders.
        streamed: returns what stands for a view of a streamed weight, which has no number.
        task: the backward pass that asks for the tensors; None: no place holder is filled.
        check: compares the tensors with those of the first run.
    """

    def __init__(
        self,
        name: str,
        part: Part,
        streamed: Streamed,
        task: int | None,
        check: ForwardCheck | None,
    ) -> None:
        self._name = name
        self._part = part
        self._streamed = streamed
        self._task = task
        self._check = check
        self.noted: dict[int, Noted] = {}
        """What is known of the bits of this run's tensors, by number, if they are compared."""
        living = [index for index, ref in enumerate(part.place_holders) if ref() is not None]
        self._last = living[-1] if living else -1
        self._num_seen = 0

    def on(self, layer: str) -> contextlib.AbstractContextManager[None]:
        """Collect what is saved inside of this context."""
        return _given_to(pack_hook(_collect, self, is_second_run=True), layer)

    def collect(self, tensor: Tensor) -> Tensor | StreamedTensor:
        """Take *tensor* over; return what the second run's own graph is to hold.

        No backward goes through that graph, but for those that a layer runs in its forward.
        """
        if type(tensor) is not Tensor and isinstance(tensor, Parameter):
            return tensor
        streamed = self._streamed(tensor)
        if streamed is not None:
            return streamed
        index = self._num_seen
        self._num_seen = index + 1
        held = tensor.detach()
        if index > self._last:
            return held
        meta, before = (tensor.shape, tensor.dtype, tensor.device), self._part.metas[index]
        if meta != before:
            raise _other_tensors(
                self._name,
                f"tensor {index} that it saves has {_described(meta)}; in forward it had "
                f"{_described(before)}",
            )
        place_holder = self._part.place_holders[index]()
        if place_holder is not None:
            if self._task is not None:
                place_holder.fill(held, self._task)
            if self._check is not None:
                self.noted[index] = self._check.note_again(self._part.noted[index], held)
        if index == self._last:
            raise AllCollectedError(self)
        return held

    def end(self, rehearsed: Mapping[int, Noted]) -> None:
        """End the run: raise if not all was saved that was to be, and compare what was.

        Args:
            rehearsed: what was noted of a second run before this one, if there was one.
        """
        if self._num_seen <= self._last:
            raise _other_tensors(
                self._name,
                f"it saved {self._num_seen} tensors, and in forward at least {self._last + 1}",
            )
        if self._check is None or self._task is None:
            return
        now = list(self.noted.values())
        self._check.compare([self._part.noted[index] for index in self.noted], now)
        if rehearsed:
            self._check.compare_second_runs([rehearsed[index] for index in self.noted], now)


def for_no_one(layer: str, streamed: Streamed) -> contextlib.AbstractContextManager[None]:
    """Let what *layer* saves inside of this context live only as long as the graph there."""
    return _given_to(pack_hook(_held, streamed, is_second_run=True), layer)


@contextlib.contextmanager
def _given_to(hooks: Pack, layer: str) -> Iterator[None]:
    try:
        push_hooks(hooks, _given)
        yield
    finally:
        pop_hooks(hooks, layer)


def _collect(collector: Collector, tensor: Tensor) -> Tensor | StreamedTensor:
    return collector.collect(tensor)


def _held(streamed: Streamed, tensor: Tensor) -> Tensor | StreamedTensor:
    return tensor if isinstance(tensor, Parameter) else streamed(tensor) or tensor.detach()


def _given(saved: Tensor | StreamedTensor) -> Tensor:
    return saved.give() if isinstance(saved, StreamedTensor) else saved


def _described(meta: Meta) -> str:
    shape, dtype, device = meta
    return f"shape {tuple(shape)}, {dtype}, on {device}"


def _other_tensors(name: str, what: str) -> RecomputationError:
    return RecomputationError(
        f"{name} ran again in backward (checkpoint_every), and computed something else than in "
        f"forward: {what}. A layer must compute the same from the same inputs: its result must not "
        "depend on the time, a counter of its own or a cache. Give checkpoint_every=0 for this "
        "model.",
        key="recompute-differs",
    )
