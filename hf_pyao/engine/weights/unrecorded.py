"""Runs work of the ring outside of a layer's trace, of its graph and of inference mode."""

from __future__ import annotations

from typing import Any

import torch

from hf_pyao.engine.recompute.dispatch_modes import modes_on
from hf_pyao.engine.recompute.tracing import Trace


class unrecorded:
    """Pauses traces, and leaves grad mode and inference mode, while its block runs.

    It is not a generator: the traceback of an interrupt would keep a generator open, and closing it
    later would set the grad mode of that moment.
    """

    __slots__ = ("_has_gradients", "_inference", "_traces")

    def __enter__(self) -> None:
        self._has_gradients = torch.is_grad_enabled()
        self._inference: Any = None
        self._traces = [
            mode for mode in modes_on() if isinstance(mode, Trace) and not mode.is_paused
        ]
        for trace in self._traces:
            trace.pause()
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        torch.set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        try:
            torch.set_grad_enabled(self._has_gradients)
        finally:
            torch.set_grad_enabled(self._has_gradients)
            for trace in self._traces:
                trace.go_on()
            if self._inference is not None:
                self._inference.__exit__(*error)
