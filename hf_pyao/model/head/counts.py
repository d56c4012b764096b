"""Counting what forwards did, from several threads and without a lock."""

from __future__ import annotations

from threading import get_ident


class Counts:
    """Sums of events: ``chunked`` (forwards whose loss was computed without the logits), ``own``
    (training forwards with labels that kept the model's own loss), ``read`` (logits that somebody
    read although the loss was computed without them). Every thread adds to numbers of its own."""

    def __init__(self) -> None:
        self._by_thread: dict[tuple[str, int], int] = {}

    def add(self, name: str) -> None:
        """Count one more of *name*."""
        key = (name, get_ident())
        self._by_thread[key] = self._by_thread.get(key, 0) + 1

    def total(self, name: str) -> int:
        """Return how many of *name* there were."""
        return sum(num for (key, _), num in list(self._by_thread.items()) if key == name)
