"""Steps that are only looked at, of which nothing is to be said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hf_pyao.model.fake_cuda.cuda_operations import ONE_THREAD


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of what is done inside: it is not what training will do."""
    with _at_least("hf_pyao", logging.ERROR):
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Stop torch from printing the traceback of an operation that raises on fake tensors."""
    with _at_least("torch._subclasses.fake_tensor", logging.CRITICAL):
        yield


@contextmanager
def _at_least(name: str, lowest: int) -> Iterator[None]:
    logger = logging.getLogger(name)
    with ONE_THREAD:
        level = logger.level
        logger.setLevel(max(level, lowest))
        try:
            yield
        finally:
            logger.setLevel(level)
