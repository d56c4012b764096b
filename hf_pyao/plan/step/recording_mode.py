"""What shows a step to a recorder: settings, a mode that sees operations, a transport of copies.

The model is attached with :data:`RECORDING`, so that everything leaves at once, over a
:class:`RecordingTransport`, and its step runs under a :class:`RecordingMode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.transfer.transport import BlockingTransport, DoneTicket, LinkTimes
from hf_pyao.plan.step.step_recorder import StepRecorder

RECORDING = {"policy": "all", "min_bytes": 0, "keep_last_layers": 0, "window": 0}
"""Settings of :class:`~hf_pyao.PyAOConfig` under which a step is recorded."""


class RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, has a recorder see every operation.

    Args:
        recorder: what sees them.
        compiles: code may be compiled under this mode, which then sees what that code runs.
    """

    def __init__(self, recorder: StepRecorder, *, compiles: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._compiles = compiles

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Say whether torch.compile may compile under this mode."""
        return self._compiles

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and record it."""
        if func is torch.ops.prim.device.default:  # asked thousands of times in a step
            (tensor,) = args
            if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
                return tensor.fake_device
        return self._recorder.see(func, args, kwargs or {})


class RecordingTransport(BlockingTransport):
    """Copies at once, and tells a recorder which storages are copied."""

    name = "recording"

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def _copy(
        self,
        direction: str,
        src: torch.Tensor,
        dst: torch.Tensor,
        after: Sequence[Any],
        label: object,
        times: LinkTimes | None,
    ) -> DoneTicket:
        assert isinstance(label, Slot)
        recorder = self._recorder
        if not recorder.has_begun:  # a micro-batch before the one that is recorded
            return super()._copy(direction, src, dst, after, label, None)
        if direction == "offload":
            recorder.left(label, src, dst.nbytes)
        else:
            recorder.came_back(label, dst)
        if isinstance(src, FakeTensor):
            return DoneTicket(src.nbytes)  # there is nothing to copy
        recorder.is_paused = True
        try:
            return super()._copy(direction, src, dst, after, label, None)
        finally:
            recorder.is_paused = False
