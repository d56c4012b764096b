"""Steps that are only looked at, of which nothing is to be said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hf_pyao.model.fake_cuda.cuda_operations import ONE_THREAD

FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""The logger by which torch prints the traceback of an operation that raises on fake tensors."""


@contextmanager
def quiet(name: str = "hf_pyao") -> Iterator[None]:
    """Let logger *name* say nothing of what is done inside: it is not what training will do."""
    logger = logging.getLogger(name)
    with ONE_THREAD:
        level = logger.level
        logger.setLevel(max(level, logging.CRITICAL))
        try:
            yield
        finally:
            logger.setLevel(level)
