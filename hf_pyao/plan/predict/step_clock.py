"""The clock of a predicted step: where compute is, and when copies are done."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from itertools import accumulate

from hf_pyao.plan.hardware.host_model import FAR_AHEAD, IN_STEP, HostClock, HostModel
from hf_pyao.plan.predict.collective_lane import CollectiveLane
from hf_pyao.plan.predict.copy_lanes import Copy, Lanes
from hf_pyao.plan.step.prediction import Stall
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD


class StepClock(abc.ABC):
    """Where compute has got to, and the copies beside it. Times are in ms since the step began."""

    phase = FORWARD
    """Whose waits are counted."""

    def enter(self, phase: str) -> None:
        """Count the waits of *phase* from now on."""
        self.phase = phase

    @property
    @abc.abstractmethod
    def now_ms(self) -> float:
        """Where compute has got to."""

    @abc.abstractmethod
    def run_kernel(self, elapsed_ms: float) -> float:
        """Run a kernel that the host queues; return when it starts."""

    def run_kernels(self, elapsed_ms: Sequence[float]) -> list[float]:
        """Run kernels one after the other; return when each starts. 0 ms stand for no kernel."""
        return [self.run_kernel(each) if each else self.now_ms for each in elapsed_ms]

    @abc.abstractmethod
    def advance(self, elapsed_ms: float) -> None:
        """Let compute go on for *elapsed_ms*."""

    @abc.abstractmethod
    def book(self, copy: Copy) -> None:
        """Queue *copy*."""

    @abc.abstractmethod
    def is_done(self, copy: Copy) -> bool:
        """Say whether the host knows by now that *copy* is done."""

    @abc.abstractmethod
    def wait(self, copy: Copy) -> None:
        """Let compute wait for *copy*."""

    @abc.abstractmethod
    def queue_collective(self, elapsed_ms: float, *, is_gather: bool) -> None:
        """Queue a collective, which takes *elapsed_ms* and no compute."""

    @abc.abstractmethod
    def await_collective(self, which: int) -> None:
        """Let compute wait for a collective: 1 is the newest, 2 the one before; 0: for all."""


class LanesClock(StepClock):
    """A clock over :class:`~hf_pyao.plan.predict.copy_lanes.Lanes`.

    Args:
        lanes: say when copies are done.
        host: how far the host runs ahead of the device.
        is_timed: compute takes time; False: none, and all happens at 0.
    """

    def __init__(self, lanes: Lanes, host: HostModel, *, is_timed: bool) -> None:
        self._now_ms = 0.0
        self.stall_ms = {FORWARD: 0.0, BACKWARD: 0.0}
        self.stalls: list[Stall] = []
        self._is_timed = is_timed
        self._lanes = lanes
        self._collectives = CollectiveLane()
        self.collective_wait_ms = {FORWARD: 0.0, BACKWARD: 0.0}
        """How long compute has waited for collectives."""
        self._host = HostClock(host)
        self._host_takes_no_time = host in (FAR_AHEAD, IN_STEP)

    @property
    def now_ms(self) -> float:
        """Where compute has got to."""
        return self._now_ms

    def run_kernel(self, elapsed_ms: float) -> float:
        """Run a kernel that the host queues; return when it starts."""
        if self._host_takes_no_time:  # it never keeps the device waiting
            start_ms = self._now_ms
            self._now_ms += elapsed_ms
            return start_ms
        start_ms = self._host.launch(self._now_ms)
        self._now_ms = start_ms + elapsed_ms
        self._host.ends(self._now_ms)
        return start_ms

    def run_kernels(self, elapsed_ms: Sequence[float]) -> list[float]:
        """Run kernels one after the other; return when each starts. 0 ms stand for no kernel."""
        if not self._host_takes_no_time:
            return super().run_kernels(elapsed_ms)
        starts_ms = list(accumulate(elapsed_ms, initial=self._now_ms))
        self._now_ms = starts_ms.pop()
        return starts_ms

    def advance(self, elapsed_ms: float) -> None:
        """Let compute go on for *elapsed_ms*."""
        if self._is_timed:
            self._now_ms += elapsed_ms

    def book(self, copy: Copy) -> None:
        """Queue *copy*."""
        self._lanes.book(copy)

    def is_done(self, copy: Copy) -> bool:
        """Say whether the host knows by now that *copy* is done."""
        return self._lanes.is_done(copy, self._host.seen_ms(self._now_ms))

    def wait(self, copy: Copy) -> None:
        """Let compute wait for *copy*."""
        until_ms = self._lanes.wait(copy, self._now_ms)
        if until_ms > self._now_ms:
            self.stalls.append(Stall(self.phase, copy.slot, self._now_ms, until_ms, copy.layer))
        self.stall_ms[self.phase] += until_ms - self._now_ms
        self._now_ms = until_ms

    def queue_collective(self, elapsed_ms: float, *, is_gather: bool) -> None:
        """Queue a collective, which takes *elapsed_ms* and no compute."""
        self._collectives.queue(elapsed_ms, self._now_ms, is_gather=is_gather)

    def await_collective(self, which: int) -> None:
        """Let compute wait for a collective: 1 is the newest, 2 the one before; 0: for all."""
        lane = self._collectives
        until_ms = lane.wait(which, self._now_ms) if which else lane.finish(self._now_ms)
        self.collective_wait_ms[self.phase] += until_ms - self._now_ms
        self._now_ms = until_ms

    def end_of(self, copy: Copy) -> float:
        """Return when *copy*, which was queued, ends."""
        return self._lanes.wait(copy, 0.0)

    def wait_until(self, until_ms: float, slot: int) -> None:
        """Let compute wait for the disk, which has to take *slot*."""
        if until_ms > self._now_ms:
            self.stalls.append(Stall(self.phase, slot, self._now_ms, until_ms))
            self.stall_ms[self.phase] += until_ms - self._now_ms
            self._now_ms = until_ms

    def finish(self) -> None:
        """Run the copies that end after compute."""
        self._lanes.finish(self._now_ms)
