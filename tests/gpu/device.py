"""The device that these tests run on, and a stand-in to try the tests themselves without one.

With ``PYAO_GPU_DRY_RUN=1`` (one case of each test) or ``all`` they run on a CPU: a simulated
transport stands for the streams, torch's CPU allocator for the device's. That proves nothing about
a GPU; it shows that the tests are free of mistakes before they meet one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_pyao.runtime.simulated import SimulatedTransport
from hf_pyao.runtime.stream_transport import StreamTicket, StreamTransport
from hf_pyao.runtime.transport import Transport
from tests.ledger import AllocationLedger

CYCLES_PER_MS = 1_000_000
"""Argument of torch's sleeping kernel for about a millisecond, on GPUs of 1 to 2 GHz."""


class Device(ABC):
    """What the tests ask of a device."""

    torch_device: torch.device

    @abstractmethod
    def transport(self, copy_streams: int = 2) -> Transport:
        """Return the transport that would be picked for the device."""

    @abstractmethod
    def slow_transport(self, seed: int, *, waits: bool = True) -> Transport:
        """Return a transport whose copies come late, by times drawn with *seed*.

        Without *waits* it never makes compute wait: broken on purpose.
        """

    @abstractmethod
    def sleep(self, sleep_ms: float) -> None:
        """Queue a pause on the compute stream."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that was queued is done."""

    @abstractmethod
    def left_allocated(self, run: Callable[[], Any]) -> tuple[int, Any]:
        """Return the bytes that *run* leaves allocated, once copies are done, and its result."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the generator that dropout draws from."""

    @abstractmethod
    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return what the profiler should record."""


class Gpu(Device):
    """The first CUDA device (ROCm goes by that name too)."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)

    def transport(self, copy_streams: int = 2) -> Transport:
        return StreamTransport(copy_streams)

    def slow_transport(self, seed: int, *, waits: bool = True) -> Transport:
        return SleptTransport(seed, waits=waits)

    def sleep(self, sleep_ms: float) -> None:
        torch.cuda._sleep(int(sleep_ms * CYCLES_PER_MS))

    def finish(self) -> None:
        torch.cuda.synchronize()

    def left_allocated(self, run: Callable[[], Any]) -> tuple[int, Any]:
        self.finish()
        before = torch.cuda.memory_allocated()
        result = run()
        self.finish()
        return torch.cuda.memory_allocated() - before, result

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


class StandIn(Device):
    """A CPU in a GPU's place."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def transport(self, copy_streams: int = 2) -> Transport:
        return SimulatedTransport(copy_streams=copy_streams)

    def slow_transport(self, seed: int, *, waits: bool = True) -> Transport:
        return SimulatedTransport(seed) if waits else _NeverWaiting(seed)

    def sleep(self, sleep_ms: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def left_allocated(self, run: Callable[[], Any]) -> tuple[int, Any]:
        with AllocationLedger() as ledger:
            result = run()
        return ledger.live_bytes, result

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU]


class SleptTransport(StreamTransport):
    """Streams on which a sleeping kernel runs before each copy, for up to a millisecond."""

    def __init__(self, seed: int, *, waits: bool = True) -> None:
        super().__init__(copy_streams=2)
        self._random = random.Random(seed)
        self._waits = waits

    def offload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: str = ""
    ) -> StreamTicket:
        self._sleep(self._of(src.device).d2h)
        return super().offload(src, dst, after=after, label=label)

    def reload(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: Sequence[Any] = (), label: str = ""
    ) -> StreamTicket:
        self._sleep(self._of(dst.device).h2d)
        return super().reload(src, dst, after=after, label=label)

    def wait(self, ticket: StreamTicket) -> None:
        if self._waits:
            super().wait(ticket)

    def _sleep(self, stream: torch.Stream) -> None:
        with stream:
            torch.cuda._sleep(int(self._random.choice((0.0, 0.1, 1.0)) * CYCLES_PER_MS))


class _NeverWaiting(SimulatedTransport):
    """A simulated transport that completes no copy on behalf of compute."""

    def wait(self, ticket: Any) -> None:
        pass


def is_dry_run(environment: dict[str, str]) -> bool:
    """Say whether the stand-in was asked for."""
    return environment.get("PYAO_GPU_DRY_RUN", "0") != "0"
