"""What a step comes to with a plan carried out in it: time, peak, and what is reserved for it."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, IN_STEP, HostCosts, HostModel
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.blocking_copies import with_blocking_copies
from hf_pyao.plan.predict.host_times import host_times_ms
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.planned_step import PlannedStep
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram


class Outcome:
    """The prediction of one step, computed when it is first asked for.

    Args:
        step: with a plan carried out in it.
        link: speeds of copies.
        window_bytes: what may be in flight; None: compute and copies meet at the end of each layer.
        allocator: settings of the device's caching allocator; None: what is allocated counts.
        gradient_bytes: what leaves for the host beside whenever a layer's backward ends.
        is_blocking: compute stands still while copies run.
        host: what the step costs the host; None: it is never slower than the device.
    """

    def __init__(
        self,
        step: PlannedStep,
        link: LinkModel,
        *,
        window_bytes: int | None,
        allocator: AllocatorSettings | None = None,
        gradient_bytes: int = 0,
        is_blocking: bool = False,
        host: HostCosts | None = None,
    ) -> None:
        self.step = step
        self.link = link
        self.window_bytes = window_bytes
        self._allocator = allocator
        self._gradient_bytes = gradient_bytes
        self._is_blocking = is_blocking
        self._host_ms = () if host is None else host_times_ms(step, host)
        self._memories: dict[AllocatorSettings | None, StepMemory] = {}
        self._elsewhere_ms: dict[float, tuple[float, float]] = {}

    @property
    def program(self) -> StepProgram:
        """The step, with what a plan does to it."""
        return self.step.program

    @cached_property
    def timed(self) -> Prediction:
        """With the link's speed."""
        return self._blocked(self._walked(self.link), self.link)

    @cached_property
    def late(self) -> Prediction:
        """With copies that are never early: its peak holds on every link."""
        step = self.step
        return predict(
            step.program,
            step.leaves,
            window_bytes=self.window_bytes,
            rebuilds=step.rebuilds,
            coded=step.coded,
        )

    @property
    def memory(self) -> StepMemory:
        """What the device's allocator reserves, and whether that fits."""
        return self.under(self._allocator)

    @property
    def step_ms(self) -> float:
        """Time of the step."""
        return self.timed.step_ms

    @property
    def stall_ms(self) -> float:
        """Of it, what compute waits for copies."""
        return self.timed.stall_forward_ms + self.timed.stall_backward_ms

    @property
    def peak_bytes(self) -> int:
        """Peak of what is allocated on the device."""
        return self.late.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Peak on the host, with the masters of streamed weights."""
        return self.late.host_peak_bytes + self.program.streamed.host_bytes

    def under(self, allocator: AllocatorSettings | None) -> StepMemory:
        """Return the memory under other settings of the allocator."""
        if allocator not in self._memories:
            early = None if self._is_blocking else self.early
            self._memories[allocator] = StepMemory(self.program, self.late, early, allocator)
        return self._memories[allocator]

    def early(self) -> Prediction:
        """Predict it with a host that sees each copy as it is done: its memory may be another."""
        return self._walked(self.link, IN_STEP)

    def step_ms_at(self, ratio: float) -> float:
        """Return what the step takes over a link *ratio* times as fast."""
        return self._at(ratio)[0]

    def stall_ms_at(self, ratio: float) -> float:
        """Return what compute waits for copies over a link *ratio* times as fast."""
        return self._at(ratio)[1]

    def _at(self, ratio: float) -> tuple[float, float]:
        if ratio == 1.0 or not (self.late.offloaded_bytes or self.late.uploaded_bytes):
            return self.step_ms, self.stall_ms
        if ratio not in self._elsewhere_ms:
            link = _scaled(self.link, ratio)
            found = self._blocked(self._walked(link), link)
            stall_ms = found.stall_forward_ms + found.stall_backward_ms
            self._elsewhere_ms[ratio] = found.step_ms, stall_ms
        return self._elsewhere_ms[ratio]

    def _walked(self, link: LinkModel, host: HostModel = FAR_AHEAD) -> Prediction:
        step = self.step
        return predict(
            step.program,
            step.leaves,
            window_bytes=self.window_bytes,
            times_ms=step.times_ms,
            link=None if self._is_blocking else link,
            rebuilds=step.rebuilds,
            gradient_bytes=self._gradient_bytes,
            coded=step.coded,
            host=host,
            host_ms=self._host_ms,
        )

    def _blocked(self, timed: Prediction, link: LinkModel) -> Prediction:
        """Return *timed* with copies in the way of compute, if they are."""
        return with_blocking_copies(timed, link, self.program) if self._is_blocking else timed


def _scaled(link: LinkModel, ratio: float) -> LinkModel:
    """Return *link* with *ratio* times the speed."""
    return dataclasses.replace(
        link,
        d2h_gib_per_s=link.d2h_gib_per_s * ratio,
        h2d_gib_per_s=link.h2d_gib_per_s * ratio,
        host_memory_gib_per_s=link.host_memory_gib_per_s * ratio,
    )
