"""Tells stderr how far a command has come: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from hf_pyao.text import say

SECONDS_BETWEEN_LINES = 5.0
"""Least time between two lines, and before the first."""


class Progress:
    """Tells how many parts of a task are done.

    Args:
        task: what is done, as it is told.
        total: how many parts there are; None: that is not known.
        unit: what the parts are called.
        is_shown: False: nothing is told.
    """

    def __init__(self, task: str, total: int | None, unit: str, *, is_shown: bool) -> None:
        self._task = task
        self._total = total
        self._unit = unit
        self._is_shown = is_shown
        self._num_done = 0
        self._bar: Any = None
        self._begun_s = self._told_s = time.monotonic()

    def __enter__(self) -> Progress:
        """Begin."""
        if self._is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, leave=False, unit=self._unit, desc=self._task)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; a bar goes away."""
        if self._bar is not None:
            self._bar.close()

    def done(self, part: str) -> None:
        """Note that *part* is done."""
        self._num_done += 1
        if self._bar is not None:
            self._bar.update()
            return
        now_s = time.monotonic()
        if self._is_shown and now_s - self._told_s >= SECONDS_BETWEEN_LINES:
            self._told_s = now_s
            say(self._line(part, now_s - self._begun_s), sys.stderr)

    def _line(self, part: str, elapsed_s: float) -> str:
        known = f"{self._num_done} {self._unit}"
        rest = ""
        if self._total is not None:
            known = f"{self._num_done} of {self._total} {self._unit}"
            left_s = elapsed_s / self._num_done * (self._total - self._num_done)
            rest = f"; about {left_s:.0f} s more if the rest takes as long each"
        return f"{self._task}: {known} after {elapsed_s:.0f} s ({part}){rest}"
