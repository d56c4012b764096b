"""Stand-ins that were made of each other, and so have to become tensors together."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_Member = TypeVar("_Member")


class Relatives(Generic[_Member]):
    """Those of a family that are alive, the oldest first. Keeps none of them alive."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[_Member]] = []

    def add(self, member: _Member) -> None:
        """Take up *member*, which is younger than all others."""
        self._members.append(weakref.ref(member))

    def living(self) -> Iterator[_Member]:
        """Yield the living members in the order in which they were made."""
        for reference in self._members:
            member = reference()
            if member is not None:
                yield member
