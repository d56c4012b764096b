"""Steps that are only looked at, of which nothing is to be said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of what is done inside: it is not what training will do."""
    logger = logging.getLogger("hf_pyao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
