"""Which storages are alive, and how many bytes: the memory of a device that is not there.

:class:`MemoryLedger` counts what it is told of; :class:`NotingMode` tells it of every operation's
results. Both take real tensors of a CPU and fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings
from hf_pyao.plan.hardware.kernel_workspaces import call_of, workspace_of


class MemoryLedger:
    """Live storages and their bytes, by storage identity.

    A storage counts, whole and once, from when a tensor of it is first noted until the last tensor
    of it is gone; what it held when it was noted is its size. The ledger holds weak references
    alone, so that it keeps nothing alive. For one thread.

    Args:
        is_host: says which storages are not the device's; they are left out. A pool's
            :meth:`~hf_pyao.engine.stores.HostPool.owns` does, for what is offloaded to it.

    Attributes:
        peak_bytes: most bytes that were alive at once, as seen after each note.
        phase_peak_bytes: the same for each part that :meth:`end_phase` named, in order.
    """

    def __init__(self, is_host: Callable[[torch.UntypedStorage], bool] | None = None) -> None:
        self.peak_bytes = 0
        self.phase_peak_bytes: dict[str, int] = {}
        self._is_host = is_host
        # Looked up now: when the interpreter ends, ``torch`` is gone before ledgers are.
        self._free_weak_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
        # By weak reference, which is the storage's address. While it is held no other storage gets
        # that address. Not Python's weak references: they may live on while a simulated transport
        # holds a weak reference of this kind to the same storage.
        self._bytes_by_key: dict[int, int] = {}
        self._counted_bytes = 0
        self._peak_of_phase_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now."""
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._bytes_by_key if expired(key)]:
            self._counted_bytes -= self._bytes_by_key.pop(key)
            self._free_weak_ref(key)
        return self._counted_bytes

    def note(self, tensors: Iterable[torch.Tensor], workspace_bytes: int = 0) -> None:
        """Count the storages of *tensors* that are not counted yet. Takes strided tensors.

        Args:
            tensors: what an operation returned.
            workspace_bytes: what its kernel allocated inside, beside them, and has freed since.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._bytes_by_key:
                continue
            if self._is_host is not None and self._is_host(storage):
                continue
            key = cast(int, storage._weak_ref())
            self._bytes_by_key[key] = storage.nbytes()
            self._counted_bytes += self._bytes_by_key[key]
        # What is counted may be gone by now: it is looked for only where it could make a peak.
        if self._counted_bytes + workspace_bytes > self._peak_of_phase_bytes:
            peak_bytes = self.live_bytes + workspace_bytes
            self._peak_of_phase_bytes = max(self._peak_of_phase_bytes, peak_bytes)
            self.peak_bytes = max(self.peak_bytes, self._peak_of_phase_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count what a storage holds now that it was resized, if it is counted at all."""
        key = storage._cdata
        if key in self._bytes_by_key:
            self._counted_bytes += storage.nbytes() - self._bytes_by_key[key]
            self._bytes_by_key[key] = storage.nbytes()
            self.note(())

    def end_phase(self, name: str) -> None:
        """Write the peak since the last call down under *name*; the next one starts from here."""
        self.phase_peak_bytes[name] = self._peak_of_phase_bytes
        self._peak_of_phase_bytes = self.live_bytes

    def __del__(self) -> None:
        """Let go of the weak references."""
        for key in self._bytes_by_key:
            self._free_weak_ref(key)


class NotingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes what each operation returns in a ledger.

    Args:
        ledger: what is told.
        fake_mode: the mode that the operations run in, if they are on fake tensors.
        kernels: the device and the process that workspaces of kernels are computed for.

    Tensors from before it are noted by hand::

        ledger = MemoryLedger(offloader.link.tiers.owns)
        ledger.note([*model.parameters(), *model.buffers()])
        with NotingMode(ledger):
            model(**batch).loss.backward()
        ledger.peak_bytes
    """

    def __init__(
        self,
        ledger: MemoryLedger,
        fake_mode: FakeTensorMode | None = None,
        kernels: KernelSettings = ANY_DEVICE,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self._kernels = kernels
        self._fake_mode = fake_mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it returns."""
        kwargs = kwargs or {}
        with without_cache_for(self._fake_mode, func):
            result = func(*args, **kwargs)
        inside_bytes = workspace_of(call_of(func, args, kwargs), self._kernels)
        self.ledger.note(tensors_in(result), inside_bytes)
        return result


@contextmanager
def without_cache_for(fake_mode: FakeTensorMode | None, func: Any) -> Iterator[None]:
    """Run ``set_`` without the cache of fake results, which would keep its storages."""
    if fake_mode is None or func._overloadpacket is not torch.ops.aten.set_:
        yield
        return
    was_enabled, fake_mode.cache_enabled = fake_mode.cache_enabled, False
    try:
        yield
    finally:
        fake_mode.cache_enabled = was_enabled
