"""What a step comes to under a plan: what :func:`~hf_pyao.plan.predict.predict.predict` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy

from hf_pyao.engine.transfer.layout import RANGE_ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step comes to under a plan."""

    step_ms: float
    """Until compute is done; NaN without a device."""
    compute_ms: float
    """Compute alone, what is recomputed included; NaN without a device."""
    stall_forward_ms: float
    """How long forward waits for copies."""
    stall_backward_ms: float
    """How long backward waits for copies."""
    collective_forward_ms: float = 0.0
    """How long forward waits for collectives."""
    collective_backward_ms: float = 0.0
    """How long backward waits for collectives, until all have ended."""
    host_forward_ms: float = 0.0
    """How long the device waits in forward for the host to queue what is next."""
    host_backward_ms: float = 0.0
    """The same in backward."""
    peak_bytes: int
    """Most bytes on the device."""
    peak_at: int
    """The operation after which they are there."""
    host_peak_bytes: int
    """Most bytes of the host pool in use at once."""
    offloaded_bytes: int
    """What crosses the link to the host."""
    read_in_place_bytes: int
    """What had not left when backward asked for it, and did not come back."""
    uploaded_bytes: int = 0
    """Streamed weights that cross the link to the device."""
    num_uploads: int = 0
    """Blocks that they are uploaded in."""
    trace: Trace
    """What is on the device when."""
    start_ms: tuple[float, ...] = ()
    """When each operation starts; empty where no times are predicted."""
    copies: tuple[PredictedCopy, ...] = ()
    """When copies run, by start; empty without times, or without a link."""
    stalls: tuple[Stall, ...] = ()
    """When compute waits for copies, in order; empty without times, or without a link."""

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes on the device by operation: most since the operation before, with what its kernel
        allocates inside."""
        return self.trace.live_bytes

    @property
    def lifetimes(self) -> Sequence[Lifetime]:
        """When each buffer is on the device under the plan."""
        return self.trace.lifetimes

    @property
    def memory(self) -> Sequence[MemoryEvent]:
        """What is allocated and freed on the device, in order; what is not freed lives until the
        step ends."""
        return self.trace.events


class Trace(Protocol):
    """What is on the device when; fields as the properties of :class:`Prediction`."""

    @property
    def live_bytes(self) -> tuple[int, ...]: ...

    @property
    def lifetimes(self) -> Sequence[Lifetime]: ...

    @property
    def events(self) -> Sequence[MemoryEvent]: ...

    def columns(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return :attr:`events` as two columns: numbers in place of keys, and bytes."""
        ...


Lifetime = tuple[int, int, int]
"""A stretch of operations over which a buffer is on the device: the buffer, the first operation
with it, and the first one without it. A plain tuple, because a step has thousands."""

MemoryKey = int | tuple[str, int]
"""What is allocated: a buffer of the program by its number, or one of the uses below and a number.
"""

RELOADED = "reloaded"
"""What backward gets of a slot that left, by the slot's number."""
PAYLOAD = "payload"
"""What a codec made of a slot, on its way to the host."""
ENCODED = "encoded"
"""The same, brought back."""
WORKSPACE = "workspace"
"""What is allocated and freed within one operation, or while a slot is rebuilt."""

FREED = -1


MemoryEvent = tuple[MemoryKey, int]
"""An allocation on the device and its bytes, or the end of one and :data:`FREED`."""


class Replayed(NamedTuple):
    """An operation that runs again in backward."""

    operation: int
    """Its number in the program, where it ran in forward."""
    makes: tuple[int, ...]
    """Buffers that it allocates."""
    frees: tuple[int, ...]
    """Buffers that are freed when it is done."""
    beside_bytes: int = 0
    """What it allocates beside, and frees before it is done."""
    reads: tuple[int, ...] = ()
    """Slots that are stored and that it reads, in order."""
    elapsed_ms: float = 0.0


class Rebuild(NamedTuple):
    """What it takes to rebuild a slot that was dropped, when backward first asks for it."""

    operations: tuple[Replayed, ...]
    """What runs again for it, and did not run for a slot before it, in order. What none of these
    operations frees is freed when its buffer dies."""

    @property
    def elapsed_ms(self) -> float:
        """What the operations take."""
        return sum(each.elapsed_ms for each in self.operations)


class Coded(NamedTuple):
    """A slot that a codec writes smaller: codes, and a scale for each group of them."""

    codes_bytes: int
    scales_bytes: int
    coding_ms: float
    """What encoding takes of compute, and decoding as much."""

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of what is copied to the host, one after the other; it comes back as one."""
        return self.codes_bytes, self.scales_bytes

    @property
    def payload_bytes(self) -> int:
        """What it takes on the device until it has left."""
        return self.codes_bytes + self.scales_bytes

    @property
    def nbytes(self) -> int:
        """What it takes on the host, and on the device when it is back: parts are aligned."""
        start = -(-self.codes_bytes // RANGE_ALIGNMENT_BYTES) * RANGE_ALIGNMENT_BYTES
        return start + self.scales_bytes


class PredictedCopy(NamedTuple):
    """A copy of a slot, with when it runs."""

    direction: str
    """``"offload"`` or ``"reload"``."""
    slot: int
    """Its number in the program; -1: it is of weights."""
    start_ms: float
    end_ms: float
    layer: int = -1
    """The layer whose streamed weights are copied; -1: none's."""


class Stall(NamedTuple):
    """Compute waits for a copy."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    slot: int
    """The slot whose copy is waited for, by its number in the program; -1: it is of weights."""
    start_ms: float
    end_ms: float
    layer: int = -1
    """The layer whose streamed weights are waited for; -1: none's."""
