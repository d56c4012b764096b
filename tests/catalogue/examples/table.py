"""The table of examples, and how one is run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from hf_pyao.errors import PyAOError, mark

Example = Callable[[Path], object]

EXAMPLES: dict[str, Example] = {}
"""Key -> what triggers it, given an empty folder. A function may return its error, too."""


def example(key: str) -> Callable[[Example], Example]:
    """Put a function into the table."""

    def put(function: Example) -> Example:
        assert key not in EXAMPLES, f"{key} has an example already"
        EXAMPLES[key] = function
        return function

    return put


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def message_of(key: str, folder: Path) -> str:
    """Run the example of *key*; return its message, with ``FOLDER`` for the folder.

    Raises:
        AssertionError: no message has the key.
    """
    listener = _Listener()
    logger = logging.getLogger("hf_pyao")
    logger.addHandler(listener)
    try:
        returned = EXAMPLES[key](folder)
        if isinstance(returned, PyAOError):
            listener.lines.append(str(returned))
    except PyAOError as error:
        listener.lines.append(str(error))
    finally:
        logger.removeHandler(listener)
    found = [line for line in listener.lines if line.endswith(mark(key))]
    assert found, f"no message has the key {key}: {listener.lines}"
    return found[0].replace(str(folder), "FOLDER")
