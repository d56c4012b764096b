"""Observers of an engine: they are told of slots, copies, modules, parts of the overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar, cast

import torch

from hf_pyao.engine.runtime.policy import Decision
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.metrics import MicroBatchStats

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., None])

OVERHEADS = ("encode", "decode", "trace", "restore", "recompute")
"""What :meth:`Observer.around` times: encoding and decoding by codecs, seeing operations, bringing
back what a recipe reads, and running its operations again (PyAO paper, Table 2)."""


class Observer:
    """Hears what an engine does; this one does nothing with it. Set by ``engine.observe``.

    Methods are called inside hooks, on whichever thread runs them, so they must be quick, change no
    tensor and queue no work that is waited for. On a device, work is queued and not done when they
    are called: take marks (``transport.mark``) and read them later.
    """

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        """Hear that a sub-module starts or ends.

        Args:
            layer: qualified name of the layer.
            path: the sub-module's name in its layer; empty for the layer itself.
            phase: ``"forward"`` or ``"backward"``. The backward of a sub-module starts when a
                gradient reaches its result, and ends when one reaches what it got.
            is_start: False for the end.
        """

    def on_pack(self, layer: str, path: str, tensor: torch.Tensor) -> None:
        """Hear that autograd saves *tensor*, before anything is decided.

        It hears of every tensor, parameters and those that were saved before included, but not
        from compiled layers; *path* is the sub-module that runs.
        """

    def on_unpack(self, slot: Slot) -> None:
        """Hear that backward asks for a slot, before it gets it; not from compiled layers."""

    def on_slot(self, slot: Slot, stays: str | None, decision: Decision) -> None:
        """Hear what becomes of a slot; *stays*: why it stays whatever a policy decides."""

    def on_dropped(self, layer: str, nbytes: int, *, stays: bool) -> None:
        """Hear of a storage that a layer saves which runs again as a whole; it has no slot.

        Args:
            layer: qualified name of the layer.
            nbytes: its bytes; below 0: what was told before is kept by the engine after all.
            stays: another layer has it, too, so that it is not made again.
        """

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        """Hear of a copy that was just queued.

        Args:
            direction: ``"offload"`` or ``"reload"``.
            label: the slot that is copied.
            nbytes: bytes on the link.
            ticket: stands for the copy; the transport's ``span_of`` tells when it ran.
        """

    def on_micro_batch(self, stats: MicroBatchStats) -> None:
        """Hear that a micro-batch's backward is over, and what it came to."""

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Run *work*, one of :data:`OVERHEADS` or an ``"operation"``, and return its result.

        Parts lie inside of others: what a recipe reads is restored while it is recomputed, and the
        operations of a traced layer run while they are traced.
        """
        return work()


def _to_each(method: Method) -> Method:
    """Return what calls *method*, one of :class:`Observer`'s, of each of several observers."""

    def tell(self: Observers, *args: Any, **kwargs: Any) -> None:
        call = methodcaller(method.__name__, *args, **kwargs)
        for observer in self.observers:
            call(observer)

    return cast("Method", tell)


class Observers(Observer):
    """Tells several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    on_module = _to_each(Observer.on_module)
    on_pack = _to_each(Observer.on_pack)
    on_unpack = _to_each(Observer.on_unpack)
    on_slot = _to_each(Observer.on_slot)
    on_dropped = _to_each(Observer.on_dropped)
    on_copy = _to_each(Observer.on_copy)
    on_micro_batch = _to_each(Observer.on_micro_batch)

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Run *work* inside of each."""
        for observer in reversed(self.observers):
            work = partial(observer.around, what, label, work)
        return work()
