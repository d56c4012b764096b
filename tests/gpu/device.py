"""The device that these tests run on, and a stand-in to try the tests themselves without one.

With ``HF_PYAO_GPU_DRY_RUN=1`` (one case of each test) or ``all`` they run on a CPU: a simulated
transport stands for the streams, torch's CPU allocator for the device's. That proves nothing about
a GPU; it shows that the tests are free of mistakes before they meet one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_pyao.engine.transfer.stream_transport import StreamTicket, StreamTransport
from hf_pyao.engine.transfer.transport import Transport
from tests.helpers.ledger import AllocationLedger
from tests.helpers.simulation.transport import SimulatedTransport

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
    """The first device of the accelerator that torch finds."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        self.torch_device = torch.device(accelerator.type, 0)

    def transport(self, copy_streams: int = 2) -> Transport:
        return StreamTransport(copy_streams)

    def slow_transport(self, seed: int, *, waits: bool = True) -> Transport:
        return SleptTransport(seed, waits=waits)

    def sleep(self, sleep_ms: float) -> None:
        sleep_on(self.torch_device, sleep_ms)

    def finish(self) -> None:
        torch.accelerator.synchronize()

    def left_allocated(self, run: Callable[[], Any]) -> tuple[int, Any]:
        self.finish()
        before = torch.accelerator.memory_allocated()
        result = run()
        self.finish()
        return torch.accelerator.memory_allocated() - before, result

    def rng_state(self) -> torch.Tensor:
        return torch.get_device_module(self.torch_device).get_rng_state()

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        return sorted(torch.profiler.supported_activities(), key=str)


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

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **how: Any) -> StreamTicket:
        self._sleep(self._of(src.device).d2h)
        return super().offload(src, dst, **how)

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **how: Any) -> StreamTicket:
        self._sleep(self._of(dst.device).h2d)
        return super().reload(src, dst, **how)

    def wait(self, ticket: StreamTicket) -> None:
        if self._waits:
            super().wait(ticket)

    def _sleep(self, stream: torch.Stream) -> None:
        with stream:
            sleep_on(stream.device, self._random.choice((0.0, 0.1, 1.0)))


class _NeverWaiting(SimulatedTransport):
    """A simulated transport that completes no copy on behalf of compute."""

    def wait(self, ticket: Any) -> None:
        pass


def sleep_on(device: torch.device, sleep_ms: float) -> None:
    """Queue a pause on the current stream, by torch's own test kernel."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    if sleep is None:
        pytest.skip(f"torch has no sleeping kernel for {device.type}")
    sleep(int(sleep_ms * CYCLES_PER_MS))


@contextmanager
def no_host_waits(device: torch.device) -> Iterator[None]:
    """Make whatever waits for *device* an error, as torch offers it for CUDA."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        pytest.skip(f"torch does not tell what waits for {device.type}")
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def is_dry_run(environment: dict[str, str]) -> bool:
    """Say whether the stand-in was asked for."""
    return environment.get("HF_PYAO_GPU_DRY_RUN", "0") != "0"
