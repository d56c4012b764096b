"""Signals that come while torch works on fake tensors.

Torch asks Python for the device of a fake tensor, also from functions that may not fail: an
exception that is raised there ends the process, where Ctrl-C ought to raise KeyboardInterrupt and
let the training end in order. So handlers wait until they may run.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HeldInterrupts:
    """While active, signals' handlers run in :meth:`let_in` and at the end, and not in between.

    In other threads than the main one, which gets all signals, it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldInterrupts:
        """Begin."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):  # what Python does not handle raises nothing
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handlers back; have those run that waited."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.let_in()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def let_in(self) -> None:
        """Run the handlers that wait; they may raise."""
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)
