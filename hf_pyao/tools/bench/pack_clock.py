"""Times what pack hooks take of the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hf_pyao.engine.runtime.engine import OffloadEngine
    from hf_pyao.engine.runtime.saved_tensor import Handle
    from hf_pyao.engine.runtime.tape import LayerCall


class PackClock:
    """Times the pack hooks of *engine* while it is entered; before and after, nothing is added.

    What counts is the time until the hook returns: on a device copies are queued then and not done,
    on a CPU those of whole storages are. Layers that are traced or compiled are not timed.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self.elapsed_ms = 0.0
        """Of all calls so far."""
        self._engine = engine
        self._pack = engine.pack

    def __enter__(self) -> PackClock:
        """Begin."""
        self._engine.pack = self._timed
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Put the hook back as it was."""
        self._engine.pack = self._pack

    def _timed(self, call: LayerCall, tensor: torch.Tensor) -> Handle:
        start_s = time.perf_counter()
        try:
            return self._pack(call, tensor)
        finally:
            self.elapsed_ms += (time.perf_counter() - start_s) * 1e3
