"""Raises KeyboardInterrupt at a chosen line of the package, as Ctrl-C may at any."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hf_pyao

ROOT = str(Path(hf_pyao.__file__).parent)

Line = tuple[str, int, str]
"""File (relative to the package), line number, function."""


class Interrupter:
    """Counts the lines of the package that run, and raises at one of them.

    A line by which a ``with`` block is left is passed over: Python runs the handlers of signals
    after calls and jumps, none of which lies between the block's last step and its exit. (Tracing
    would raise there, and a lock would stay held that no signal can leave held.)

    The collector of garbage stands still meanwhile: it would run finalizers of objects of earlier
    tests anywhere, and Python only prints what is raised in those.

    Args:
        at: the line to raise at, counted from 0; None: nowhere.
        note: is given each line.
    """

    def __init__(self, at: int | None = None, note: Callable[[Line], None] | None = None) -> None:
        self.at = at
        self.note = note
        self.count = 0
        self.has_raised = False
        self._last_lines: dict[FrameType, int] = {}
        self._collects = True

    def __enter__(self) -> Interrupter:
        self._collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        if self._collects:
            gc.enable()
        self._last_lines.clear()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_event if frame.f_code.co_filename.startswith(ROOT) else None

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            return self._on_event
        code, number = frame.f_code, frame.f_lineno
        before = self._last_lines.get(frame)
        self._last_lines[frame] = number
        if before is not None and before in with_blocks(code.co_filename).get(number, ()):
            return self._on_event
        if self.note is not None:
            self.note((code.co_filename[len(ROOT) + 1 :], number, code.co_name))
        self.count += 1
        if self.count - 1 == self.at:
            self.has_raised = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._on_event


@cache
def with_blocks(path: str) -> dict[int, range]:
    """Return the lines of the body of each ``with`` statement in a file, by its own line."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {
        node.lineno: range(node.body[0].lineno, node.end_lineno + 1)  # type: ignore[operator]
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
    }


@contextmanager
def destructors_watched() -> Iterator[list[str]]:
    """Collect what goes wrong in destructors, where Python only prints it; interrupts may."""
    seen: list[str] = []

    def watch(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            seen.append(f"{unraisable.exc_type.__name__}: {unraisable.exc_value}")

    hook, sys.unraisablehook = sys.unraisablehook, watch
    try:
        yield seen
    finally:
        sys.unraisablehook = hook
