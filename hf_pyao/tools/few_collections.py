"""No passes of Python's cyclic garbage collector while many plans are predicted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pause the collector; a prediction makes some ten thousand objects, and no cycles.

    With torch imported each full pass goes through a million objects: three quarters of the time
    that a prediction takes. A collector that is off stays off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


COLLECTION_THRESHOLDS = (200_000, 50, 1000)
"""Of the garbage collector, for a command: steps are thousands of tuples, none of them in a
cycle. A recording leaves some thousand objects in cycles."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Have the collector pass over what is there, and come seldom; for a command, not for a run."""
    thresholds = gc.get_threshold()
    gc.freeze()  # a million imported objects, which each full pass would go through
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def importing() -> Iterator[None]:
    """Import large packages without the collector, within :func:`few_collections`.

    torch and transformers are a million objects, a quarter of the time of their import. The
    collector passes over them until :func:`few_collections` ends: what is passed over at the end of
    a process is reported as leaked by some packages.
    """
    with collections_paused():
        yield
        gc.freeze()
