"""Predicts a recorded step on the simulation's clock.

The simulation's link says when copies run, also where both directions share an engine or the host's
memory. It takes a tenth of a second: it judges the times of predictions where hundreds of points
are tried. ``simulated_step`` runs the engine itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.copy_lanes import Copy
from hf_pyao.plan.predict.predict import StepPlan, StepWalk
from hf_pyao.plan.predict.step_clock import StepClock
from hf_pyao.plan.step.prediction import Rebuild
from hf_pyao.plan.step.step_program import StepProgram
from tests.helpers.simulation.simulated_step import SimulatedStep
from tests.helpers.simulation.virtual_link import Booking, VirtualLink


def replay_step(
    program: StepProgram,
    leaves: Sequence[bool],
    *,
    times_ms: Sequence[float],
    link: LinkModel,
    window_bytes: int | None,
    rebuilds: Mapping[int, Rebuild] | None = None,
    gradient_bytes: int = 0,
    host: HostModel = FAR_AHEAD,
) -> SimulatedStep:
    """Replay a step.

    Args:
        program: the step, whole.
        leaves: for each slot, whether it is offloaded; what stays, stays.
        times_ms: what each operation takes.
        link: speeds of copies.
        window_bytes: as ``PyAOConfig.window``; None: ``"layer"``.
        rebuilds: what it takes to rebuild slots that are dropped, by number.
        gradient_bytes: what leaves for the host beside whenever a layer's backward ends.
        host: how far the host runs ahead of the device.

    Raises:
        ValueError: *leaves* or *times_ms* has not as many entries as the program.
    """
    virtual_link = VirtualLink(link, host=host)
    plan = StepPlan(leaves, window_bytes, rebuilds or {}, gradient_bytes, {})
    predicted = StepWalk(program, plan, times_ms, VirtualClock(virtual_link)).run()
    return SimulatedStep(
        virtual_link.compute_ms,
        virtual_link.stall_ms,
        predicted.peak_bytes,
        predicted.offloaded_bytes,
    )


class VirtualClock(StepClock):
    """The clock of a virtual link.

    Args:
        link: whose copies are waited for.
    """

    def __init__(self, link: VirtualLink) -> None:
        self._link = link
        self._bookings: dict[Copy, Booking] = {}
        self._collectives: list[tuple[float, float]] = []
        """Of each that was queued: no earlier than when it starts, and what it takes."""
        self._buffer_free_ms = 0.0
        """When compute was through with the last that it waited for."""

    @property
    def now_ms(self) -> float:
        """Where compute has got to."""
        return self._link.compute_ms

    def run_kernel(self, elapsed_ms: float) -> float:
        """Run a kernel that the host queues; return when it starts."""
        self._link.advance(elapsed_ms)
        return self._link.compute_ms - elapsed_ms

    def advance(self, elapsed_ms: float) -> None:
        """Let compute go on for *elapsed_ms*."""
        if elapsed_ms:
            self._link.advance(elapsed_ms)

    def book(self, copy: Copy) -> None:
        """Queue *copy*."""
        needs: list[object] = [] if copy.needs is None else [self._bookings[copy.needs]]
        self._bookings[copy] = self._link.book(copy.direction, copy.nbytes, needs)
        copy.order = len(self._bookings)

    def is_done(self, copy: Copy) -> bool:
        """Say whether the host knows by now that *copy* is done."""
        return self._link.is_done(self._bookings[copy])

    def wait(self, copy: Copy) -> None:
        """Let compute wait for *copy*."""
        self._link.wait(self._bookings[copy])

    def queue_collective(self, elapsed_ms: float, *, is_gather: bool) -> None:
        """Queue a collective, which takes *elapsed_ms* and no compute."""
        earliest_ms = self._buffer_free_ms if is_gather else self.now_ms
        self._collectives.append((earliest_ms, elapsed_ms))

    def await_collective(self, which: int) -> None:
        """Let compute wait for a collective: 1 is the newest, 2 the one before; 0: for all."""
        behind = self._collectives[: len(self._collectives) - max(0, which - 1)]
        ended_ms = 0.0
        for earliest_ms, elapsed_ms in behind:
            ended_ms = max(ended_ms, earliest_ms) + elapsed_ms
        self._link.stand_until(ended_ms)
        if which:
            self._buffer_free_ms = self.now_ms
