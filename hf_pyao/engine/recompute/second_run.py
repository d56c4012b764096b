"""What stands for the tensors of layers that run again, and how a second run fills it.

Which layers run, and when, is in ``segments``: see [Note: Segments].
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_pyao.engine.recompute.verification import FarEnoughError, ForwardCheck, Noted
from hf_pyao.engine.rerun.versions import version_of
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import Pack, pack_hook, pop_hooks, push_hooks
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.errors import RecomputationError, SavedTensorModifiedError

Meta = tuple[torch.Size, torch.dtype, torch.device]
"""What a tensor must have in common with the one that it stands in for."""

Streamed = Callable[[Tensor], StreamedTensor | None]
"""Returns what stands for a view of a streamed weight; None for other tensors."""


class RunsAgain(Protocol):
    """Layers that run again, part by part."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held while a place holder is read."""
        ...

    @property
    def check(self) -> ForwardCheck | None:
        """Compares second runs with the first one; None in a forward that is not checked."""
        ...

    def name_of(self, part: Part) -> str:
        """Name the layers of *part*, for messages."""
        ...

    def run_again(self, part: Part, task: int) -> None:
        """Fill the place holders of *part* that live, for graph task *task*."""
        ...

    def forget(self, *, is_used_only: bool) -> None:
        """Let go of what all place holders hold, or of what backward got already."""
        ...


class FilledSegments:
    """The segments that ran again and may hold tensors still."""

    def __init__(self) -> None:
        self._segments: weakref.WeakSet[RunsAgain] = weakref.WeakSet()
        self.num_runs = 0
        """How often a segment filled place holders, or a layer of one that is nested."""

    def add(self, segment: RunsAgain) -> None:
        """Count that *segment* runs again, and have the others forget what was used."""
        self.num_runs += 1
        for other in list(self._segments):
            if other is not segment:
                other.forget(is_used_only=True)
        self._segments.add(segment)

    def discard(self, segment: RunsAgain) -> None:
        """Forget *segment*, which holds nothing any more."""
        self._segments.discard(segment)


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

    def pack(self, segment: RunsAgain, layer: str, tensor: Tensor) -> PlaceHolder:
        """Return what stands for *tensor*, which its call of *layer* saves."""
        if segment.check is not None:
            self.noted.append(segment.check.note(layer, tensor))
        self.metas.append((tensor.shape, tensor.dtype, tensor.device))
        return self.hold(segment, tensor)

    def hold(self, segment: RunsAgain, tensor: Tensor) -> PlaceHolder:
        """Return what stands for *tensor*, of which nothing is noted: its call runs once."""
        place_holder = PlaceHolder(segment, self)
        place_holder.fill(tensor.detach(), NO_TASK)
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
    """Stands for a tensor that autograd saves in *part* of *segment*."""

    __slots__ = (
        *("__weakref__", "_give", "_part", "_segment", "_task", "_tensor", "_version"),
        "is_used",
    )

    def __init__(self, segment: RunsAgain, part: Part) -> None:
        self._give: Callable[[], Tensor] | None = None
        """Returns the tensor of a call that is not to run again."""
        self._segment = segment
        self._part = part
        self._tensor: Tensor | None = None
        self._version = 0
        self._task = NO_TASK
        self.is_used = False
        """True once backward got the tensor that it has now."""

    def fill(self, tensor: Tensor, task: int) -> None:
        """Hold *tensor* for the backward pass that is graph task *task*."""
        self._version = version_of(tensor)
        self._task = task
        self.is_used = False
        self._tensor = tensor

    def clear(self) -> None:
        """Let go of the tensor."""
        self._tensor = None

    def keep(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Give up the second run of its call: *keep* takes forward's tensor, which is still held.

        It returns what gives the tensor back.
        """
        tensor = self._tensor
        assert tensor is not None
        if version_of(tensor) == self._version:
            self._give = keep(tensor)
            self._tensor = None
        else:
            self._give = lambda: tensor  # reading it raises, as without hf_pyao

    def read(self) -> Tensor:
        """Return the tensor, for which its part runs again if need be."""
        if self._give is not None:
            if self._tensor is not None:
                raise self._modified()
            return self._give()
        task = current_graph_task()
        segment = self._segment
        with segment.lock:
            tensor = self._tensor
            is_in_forward = tensor is not None and self._task == NO_TASK
            if tensor is None or not (is_in_forward or self._task == task):
                segment.run_again(self._part, task)
                tensor = self._tensor
            if task == NO_TASK and not is_in_forward:
                segment.forget(is_used_only=False)  # looked at outside of a backward pass
            assert tensor is not None
            self.is_used = True
        if version_of(tensor) != self._version:
            raise self._modified()
        return tensor

    def _modified(self) -> SavedTensorModifiedError:
        return SavedTensorModifiedError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation, in {self._segment.name_of(self._part)}. Use the out-of-place form "
            "of the operation. (It fails in the same way without hf_pyao.)",
            key="changed-before-second-run",
        )


class KeptParameter:
    """Stands for a parameter that autograd saves."""

    __slots__ = ("layer", "tensor", "version")

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.layer = layer


def unpack(saved: PlaceHolder | KeptParameter | StreamedTensor) -> Tensor:
    """Return the tensor that *saved* stands for; autograd's unpack hook."""
    if type(saved) is PlaceHolder:
        return saved.read()
    if type(saved) is StreamedTensor:
        return saved.give()
    assert isinstance(saved, KeptParameter)
    if version_of(saved.tensor) != saved.version:
        raise SavedTensorModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a parameter that layer {saved.layer!r} used was changed before backward. "
            "Run backward before the optimizer steps. (It fails in the same way without hf_pyao.)",
            key="changed-before-second-run",
        )
    return saved.tensor


# ---- the second run ------------------------------------------------------------------------------


class AllCollectedError(FarEnoughError):
    """Ends a second run early: what it would still save is asked for by no one."""

    def __init__(self, collector: Collector) -> None:
        super().__init__("a segment of layers has run far enough")
        self.collector = collector


class Collector(abc.ABC):
    """Gets what the layers of *part* save as they run again.

    Args:
        name: of its layers, for messages.
        part: has the place holders.
        streamed: returns what stands for a view of a streamed weight, which has no number.
    """

    def __init__(self, name: str, part: Part, streamed: Streamed) -> None:
        self._name = name
        self._part = part
        self._streamed = streamed
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
        if isinstance(tensor, Parameter):
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
        held = self._take(index, held)
        if index == self._last:
            raise AllCollectedError(self)
        return held

    @abc.abstractmethod
    def _take(self, index: int, held: Tensor) -> Tensor:
        """Take over the tensor with number *index*; return what the graph is to hold."""

    def end(self) -> None:
        """End the run: raise if not all was saved that was to be."""
        if self._num_seen <= self._last:
            raise _other_tensors(
                self._name,
                f"it saved {self._num_seen} tensors, and in forward at least {self._last + 1}",
            )


class Filler(Collector):
    """Fills the place holders that live, for graph task *task*, and compares if *check* is given.

    Args:
        name: of the layers, for messages.
        part: has the place holders.
        streamed: as in the base class.
        task: the backward pass that asks for them.
        check: compares the tensors with those of the first run.
        rehearsed: what was noted of a second run before this one, by number of the tensor.
    """

    def __init__(
        self,
        name: str,
        part: Part,
        streamed: Streamed,
        task: int,
        check: ForwardCheck | None,
        rehearsed: Sequence[Noted] = (),
    ) -> None:
        super().__init__(name, part, streamed)
        self._task = task
        self._check = check
        self._rehearsed = rehearsed
        self._noted: dict[int, Noted] = {}

    def _take(self, index: int, held: Tensor) -> Tensor:
        place_holder = self._part.place_holders[index]()
        if place_holder is not None:
            place_holder.fill(held, self._task)
            if self._check is not None:
                self._noted[index] = self._check.note_again(self._part.noted[index], held)
        return held

    def end(self) -> None:
        """Compare what was taken."""
        super().end()
        if self._check is None:
            return
        indices, now = list(self._noted), list(self._noted.values())
        self._check.compare([self._part.noted[index] for index in indices], now)
        if self._rehearsed:
            self._check.compare_second_runs([self._rehearsed[index] for index in indices], now)


class Rehearsal(Collector):
    """Takes the fingerprints of what a second run saves, and holds none of its tensors."""

    def __init__(self, name: str, part: Part, streamed: Streamed, check: ForwardCheck) -> None:
        super().__init__(name, part, streamed)
        self._check = check
        self.noted: list[Noted] = []

    def _take(self, index: int, held: Tensor) -> Tensor:
        self.noted.append(self._check.note_again(self._part.noted[index], held))
        return held


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
