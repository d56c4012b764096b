"""Who is calling: for messages."""

from __future__ import annotations

import sys


def caller_outside(*packages: str) -> str:
    """Return the nearest caller that is in none of *packages*: ``function in file.py, line 12``."""
    frame = sys._getframe(1)
    inner = tuple(f"{package}." for package in packages)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inner):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} in {code.co_filename}, line {frame.f_lineno}"
