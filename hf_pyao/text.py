"""Text for people: bad values and errors in one line, and safe to print."""

from __future__ import annotations

import reprlib
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import TextIO

_LONGEST_ECHO = 120
"""Most characters of a bad value that a message repeats."""

_ECHO = reprlib.Repr()
_ECHO.maxstring = _ECHO.maxother = _ECHO.maxlong = _LONGEST_ECHO

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that steer a terminal or a page, or have no encoding: controls, marks of
direction, surrogates, line and paragraph separators."""


class Labels(dict[str, str]):
    """How messages call a setting, by its field: by a flag, a variable, a key of a file.

    A field that is not in it is called by its own name.
    """

    def __missing__(self, name: str) -> str:
        """Return *name* itself."""
        return name


def echo(value: object) -> str:
    """Return *value* as a message repeats it: like ``repr``, in one line and never long."""
    try:
        text = _ECHO.repr(value)
    except Exception:  # a bad value may have any __repr__; a whole number, too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_ECHO else f"{text[: _LONGEST_ECHO - 3]}..."


def one_line(text: str) -> str:
    """Return *text* safe to print: in one line, without control characters or escape sequences."""
    spaced = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(c) in _UNSAFE else c for c in spaced)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print *text*; what the stream's encoding has no form for becomes a question mark."""
    stream = sys.stdout if stream is None else stream
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()


def describe_error(error: BaseException) -> str:
    """Return an error of others in one line: its class, and the first line of what it says.

    Without that line's full stop: it goes into a sentence. An error that says nothing is told by
    the line that raised it.
    """
    lines = f"{error}".strip().splitlines()  # ours are without their key in an f-string
    name = type(error).__name__
    if lines:
        return one_line(f"{name}: {lines[0].rstrip('.')}")[:300]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{name}{where}"
