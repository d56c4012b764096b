"""What shows a step to a recorder: settings, a mode that sees operations, a transport, a store.

The model is attached with :data:`RECORDING`, so that everything leaves at once, over a
:class:`RecordingTransport` into a :class:`RecordingStore`, and its step runs under a
:class:`RecordingMode`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.recompute.dispatch_modes import device_asked_for
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.engine.stores.store import Buffer, HostUse, Layout, QueuedCopy, Store
from hf_pyao.engine.transfer.transport import BlockingTransport, CopyOptions, DoneTicket
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
        device = device_asked_for(func, args)
        if device is not None:
            return device
        return self._recorder.see(func, args, kwargs or {})


class RecordingTransport(BlockingTransport):
    """Copies at once, and tells a recorder which storages are copied."""

    name = "recording"

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def _copy(
        self, direction: str, src: torch.Tensor, dst: torch.Tensor, options: CopyOptions
    ) -> DoneTicket:
        label = options["label"]
        assert isinstance(label, Slot)
        recorder = self._recorder
        if direction == "offload":
            recorder.left(label, src, dst.nbytes)
        else:
            recorder.came_back(label, dst)
        if isinstance(src, FakeTensor):
            return DoneTicket(src.nbytes)  # there is nothing to copy
        with recorder.paused():
            return super()._copy(direction, src, dst, {})


class _RecordingBuffer(Buffer):
    """Stands for bytes on the host that nothing reads."""

    __slots__ = ()

    def view_like(self, layout: Layout) -> torch.Tensor:
        """Return the buffer as it is: only its bytes are counted."""
        return self.data


class RecordingStore(Store):
    """Has room for all that leaves while a step is recorded.

    Fake tensors have no bytes, so that one stands for all buffers of a size: of a recorded step
    every third operation would be there to cut buffers out of a pool. Real tensors get memory.
    """

    name = "host memory"
    capacity_bytes = 2**60

    def __init__(self) -> None:
        self._fake: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()
        self._is_making = False

    def acquire(self, nbytes: int, use: HostUse | None = None) -> Buffer:
        """Return a buffer of *nbytes*; it shares its tensor with others if that is fake."""
        data = self._fake.get(nbytes)
        if data is None:
            data = self._made(nbytes)
        self.used_bytes += nbytes
        if not isinstance(data, FakeTensor):
            return Buffer(data, nbytes)
        return _RecordingBuffer(data, nbytes)

    def _made(self, nbytes: int) -> torch.Tensor:
        self._is_making = True
        try:
            data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        finally:
            self._is_making = False
        if isinstance(data, FakeTensor):
            self._fake[nbytes] = data
            self._owned.add(data.untyped_storage()._cdata)
        return data

    def release(self, buffer: Buffer, after: QueuedCopy | None = None) -> None:
        """Count the bytes of *buffer* no longer."""
        self.used_bytes -= buffer.reserved_bytes

    def settle(self) -> int:
        """Return the bytes in use."""
        return self.used_bytes

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* is a buffer's, or becomes one."""
        return self._is_making or storage._cdata in self._owned
