"""Who is calling: for messages."""

from __future__ import annotations

import sys


def caller_outside(package: str) -> str:
    """Return the nearest caller that is no part of *package*: ``function in file.py, line 12``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_in(frame.f_globals.get("__name__", ""), package):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} in {code.co_filename}, line {frame.f_lineno}"


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
