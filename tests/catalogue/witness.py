"""Sees the keys of all errors and warnings that come while a test runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hf_pyao.errors import PyAOError
from tests.catalogue.triggered_by import TRIGGERED_BY

KEYS_OF_TEST: dict[str, set[str]] = {}
"""A test, or a case of one -> keys that it is said to trigger."""
for _key, _test in TRIGGERED_BY.items():
    KEYS_OF_TEST.setdefault(_test, set()).add(_key)


class _Reader(logging.Handler):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self._seen.update(re.findall(r"\[pyao:([a-z-]+)\]$", record.getMessage()))


@contextmanager
def keys_seen() -> Iterator[set[str]]:
    """Yield a set to which the key of each error that is made, and of each warning, is added."""
    seen: set[str] = set()
    reader, logger = _Reader(seen), logging.getLogger("hf_pyao")
    make = PyAOError.__init__

    def noted(self: PyAOError, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        seen.add(self.key)

    logger.addHandler(reader)
    try:
        with mock.patch.object(PyAOError, "__init__", noted):
            yield seen
    finally:
        logger.removeHandler(reader)


def keys_expected(test: str) -> set[str]:
    """Return the keys that a test, as pytest names it, is said to trigger."""
    return KEYS_OF_TEST.get(test, set()) | KEYS_OF_TEST.get(test.partition("[")[0], set())
