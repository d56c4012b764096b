"""Records which storages a step makes, and when each is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch

from hf_pyao.plan.step.step_program import Buffer, Resident
from hf_pyao.plan.step.weight_reads import StreamableTensors, WeightReads

_THERE_BEFORE = -1
"""In place of a buffer, for a storage that was there before the step."""

_WITHOUT_MEMORY = -2
"""In place of a buffer, for a storage whose memory was freed and which lives on."""


class StorageRecorder:
    """The storages of a step, numbered as buffers in the order in which they are made.

    A buffer is one piece of memory: a storage that is freed and allocated again by ``resize_`` is
    two buffers. Storages are held weakly.

    Args:
        device: where the step computes: tensors of other devices do not count, as shards that FSDP2
            keeps on the host. None: all count.
        is_fake: the operations are on fake tensors.
    """

    def __init__(self, device: torch.device | None, *, is_fake: bool) -> None:
        self._is_host: Callable[[torch.UntypedStorage], bool] = lambda storage: False
        """Says which storages are the host's."""
        self.residents: list[Resident] = []
        """What the model has on the device before the step."""
        self.weight_reads = WeightReads()
        """Says which frozen weight an operation reads."""
        self._device = device
        self._is_fake = is_fake
        self._births: list[tuple[int, int]] = []
        """By buffer, its bytes and the operation that made it."""
        self.forms: dict[int, str] = {}
        """By buffer, dtype and shape of the first tensor that was seen in it."""
        self._deaths: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        """Weak reference to a storage -> its buffer, :data:`_THERE_BEFORE` or
        :data:`_WITHOUT_MEMORY`."""
        self._made: set[int] = set()
        """Those of them that may go during the step: with the rest it does not matter."""
        self._gathered: set[int] = set()
        """Storages of parameters that are there for a call, see :meth:`note_gathered`."""
        self._free_weak_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref

    def leave_out(self, is_host: Callable[[torch.UntypedStorage], bool]) -> None:
        """Record nothing of storages of which *is_host* says that they are the host's."""
        self._is_host = is_host

    def note_residents(
        self, tensors: Iterable[tuple[int, torch.Tensor]], streamable: StreamableTensors
    ) -> int:
        """Record what is there before the step; return its bytes.

        Args:
            tensors: each with the layer that has it; one with several names once for each of them.
            streamable: those that may be streamed.
        """
        numbers: dict[int, int] = {}
        for layer, tensor in tensors:
            if self._is_elsewhere(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive[cast(int, storage._weak_ref())] = _THERE_BEFORE
                numbers[storage._cdata] = len(self.residents)
                known = streamable.get(id(tensor))
                resident = Resident(layer, storage.nbytes(), known is not None)
                if known is not None:
                    resident = resident._replace(**known._asdict())
                    self.weight_reads.note(storage, layer, known)
                self.residents.append(resident)
            elif tensor.nbytes == storage.nbytes() and storage._cdata in numbers:
                number = numbers[storage._cdata]
                resident = self.residents[number]
                self.residents[number] = resident._replace(num_names=resident.num_names + 1)
        return sum(each.nbytes for each in self.residents)

    def new_among(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Return the device's storages among those of *tensors* that were not seen before.

        Those without bytes do not count: the engine makes many, to put storages into.
        """
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if self._is_elsewhere(tensor):
                continue
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in self._alive and storage.nbytes() > 0
            if is_new and not self._is_host(storage):
                found[storage._cdata] = storage
        return list(found.values())

    def note_new(self, storages: Iterable[torch.UntypedStorage], operation: int) -> None:
        """Record *storages*, which the operation with this number has made."""
        for storage in storages:
            key = cast(int, storage._weak_ref())
            self._made.add(key)
            self._alive[key] = len(self._births)
            self._births.append((storage.nbytes(), operation))

    def note_forms(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the dtype and shape of *tensors* for the buffers that they lie in."""
        for tensor in tensors:
            buffer = self.buffer_of(tensor)
            if buffer >= 0 and buffer not in self.forms:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.forms[buffer] = f"{dtype}{list(tensor.shape)}"

    def note_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note parameters that are gathered for a call: they are there again when it runs again."""
        for tensor in tensors:
            if isinstance(tensor, torch.nn.Parameter):
                self._gathered.add(tensor.untyped_storage()._cdata)

    def is_gathered(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* is that of a gathered parameter."""
        return storage._cdata in self._gathered

    def resized(self, storage: torch.UntypedStorage, now: int) -> None:
        """Record that *storage* was given other memory, or none, before operation number *now*."""
        buffer = self._alive.get(storage._cdata)
        if buffer is None and self._is_fake and storage.device.type == "meta":
            key = cast(int, storage._weak_ref())
            self._made.add(key)
            self._alive[key] = buffer = _WITHOUT_MEMORY
        if buffer is None or buffer == _THERE_BEFORE:
            return  # None: another thread's
        nbytes = storage.nbytes()
        if buffer != _WITHOUT_MEMORY:
            self._deaths[buffer] = now
        self._alive[storage._cdata] = len(self._births) if nbytes else _WITHOUT_MEMORY
        if nbytes:
            self._births.append((nbytes, now))

    def sweep(self, now: int) -> None:
        """Record which storages have been freed before operation number *now*."""
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._made if expired(key)]:
            self._made.discard(key)
            buffer = self._alive.pop(key)
            self._gathered.discard(key)
            if buffer >= 0:
                self._deaths[buffer] = now
            self._free_weak_ref(key)

    def buffer_in(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of the buffer in *storage*.

        It is negative if the storage was there before or has no memory, and None if it was not
        seen.
        """
        return self._alive.get(storage._cdata)

    def buffer_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the buffer that *tensor* lies in; -1 if it was there before."""
        return self._alive.get(tensor.untyped_storage()._cdata, _THERE_BEFORE)

    def first_since(self, operation: int) -> int | None:
        """Return the first buffer that *operation* or a later one has made."""
        return next((n for n, (_, birth) in enumerate(self._births) if birth >= operation), None)

    def buffers(self, end: int) -> tuple[Buffer, ...]:
        """Return all buffers; those that are still there live until *end*."""
        return tuple(
            Buffer(nbytes, birth, self._deaths.get(number, end))
            for number, (nbytes, birth) in enumerate(self._births)
        )

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return self._device is not None and tensor.device.type != self._device.type

    def __del__(self) -> None:
        """Let go of the weak references."""
        for key in self._alive:
            self._free_weak_ref(key)
