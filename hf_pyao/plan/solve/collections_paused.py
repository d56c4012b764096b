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
