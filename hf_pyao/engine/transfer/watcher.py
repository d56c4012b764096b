"""The protocol of what is told of copies and codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class CopyWatcher(Protocol):
    """Is told what bytes do."""

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        """Record a copy that was just queued.

        Args:
            direction: ``"offload"`` or ``"reload"``.
            label: names what is copied.
            nbytes: bytes on the link.
            ticket: stands for the copy; a transport's ``span_ms`` tells when it ran.
        """
        ...

    def around(self, what: str, label: object, work: Callable[[], Result]) -> Result:
        """Run *work*, one part of the overhead (``"encode"``, ``"decode"``); return its result."""
        ...
