"""The schedule of what one engine brings back, in terms of moved bytes.

:class:`~hf_pyao.engine.transfer.schedule.Schedule` knows ids and sizes. Here an id stands for a
weak reference to the holder of the bytes: bytes without a holder are not brought back.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from hf_pyao.engine.transfer.moved_bytes import AWAY, OFFLOADING, RELOADING, MovedBytes
from hf_pyao.engine.transfer.schedule import Schedule, Window

Group: TypeAlias = "Iterable[weakref.ref[Any]]"
"""Weak references on what stands for moved bytes (:class:`HasMoved`)."""


class HasMoved(Protocol):
    """What stands for moved bytes, and dies with them."""

    @property
    def moved(self) -> MovedBytes:
        """The bytes."""
        ...


class ReloadSchedule(Schedule):
    """Brings moved bytes back ahead of their use; how a copy is queued, a subclass knows.

    Args:
        window: of the link; may be shared.
    """

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._coming: dict[int, weakref.ref[HasMoved]] = {}
        """What may be brought back, by item."""

    @abc.abstractmethod
    def reload(self, moved: MovedBytes) -> None:
        """Queue the copy of *moved* to the device."""

    @abc.abstractmethod
    def wait(self, moved: MovedBytes) -> None:
        """Order compute behind the copy of *moved* to the device, if one is under way."""

    def start_backward(self, own: Group, others: Iterator[Group]) -> None:
        """Bring back what backward asks for, ahead of it; see [Note: Window] in ``transport``.

        Args:
            own: what the layer call moved whose backward begins, in the order in which backward
                asks for it.
            others: the same of the calls that follow.
        """
        coming = self._coming
        coming.clear()
        self.start(
            _items(own, coming, (AWAY, OFFLOADING, RELOADING)),
            (_items(each, coming, (AWAY, OFFLOADING)) for each in others),
        )

    def is_away(self, item: int) -> bool:
        """Say whether the device has no copy of *item*, which can still be asked for."""
        holder = self._coming[item]()
        return holder is not None and holder.moved.phase is AWAY

    def bring_back(self, item: int) -> None:
        """Queue the copy of *item* to the device, ahead of its use."""
        holder = self._coming[item]()
        assert holder is not None
        self.reload(holder.moved)

    def await_reload(self, item: int) -> None:
        """Order compute behind the copy of *item* to the device, if one is under way."""
        holder = self._coming[item]()
        if holder is not None:
            self.wait(holder.moved)


def _items(
    group: Group, coming: dict[int, weakref.ref[HasMoved]], phases: tuple[object, ...]
) -> list[int]:
    """Return the ids of what *group* stands for that is in one of *phases*.

    What stands for each is noted in *coming*. Each layer's backward looks again at the groups
    behind it, as far as the window reaches: what was brought back already is not listed again.
    """
    items = []
    for ref in group:
        holder = ref()
        if holder is not None:
            moved = holder.moved
            if moved.phase in phases:
                coming[moved.item] = ref
                items.append(moved.item)
    return items
