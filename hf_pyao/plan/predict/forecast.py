"""Predicts a profiled step under plans: arithmetic on a profile of either kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hf_pyao.engine.runtime.policy import Policy
from hf_pyao.errors import PyAOError
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import KEEP, RECOMPUTE, Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.documents.prediction import ComparedFigure, PredictedPlan
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.policies.budget import hidden_bytes, leaving
from hf_pyao.plan.predict.calibration import times_of
from hf_pyao.plan.predict.host_times import host_costs_of
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.peak_cause import peak_cause
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.plan.step.planned_step import PlannedStep, StepPlanner
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.recorded_step import RecordedStep

BLOCKING = "blocking"
"""Name of the transport under which compute stands still while copies run."""


class ForecastError(PyAOError, ValueError):
    """A profile does not hold what a prediction needs."""


class Forecast:
    """Predicts plans for the step of a profile.

    Args:
        profile: of either kind, with its step in it.
        device: speeds of another device than the profile's; None: as it was profiled.
        link: speeds of another link; None: as it was profiled.
        window_bytes: bytes in flight; None: compute and copies meet at each layer's end.
        kernels: the other device, for what its kernels allocate inside; None: as it was profiled.
        allocator: settings of the device's caching allocator; None: it has none.

    Raises:
        ForecastError: the step is not in the profile, or no speed of a link is known.
        ReportError: the step in it is damaged.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        device: DeviceModel | None = None,
        link: LinkModel | None = None,
        window_bytes: int | None,
        kernels: KernelSettings | None = None,
        allocator: AllocatorSettings | None = None,
    ) -> None:
        if profile.program is None:
            raise ForecastError(
                f"the step is not in the profile: {profile.why_no_program or 'no reason is given.'}"
                " Without it nothing can be predicted: profile the plain model, in one process.",
                key="profile-incomplete",
            )
        self.profile = profile
        self.program = RecordedStep.from_dict(profile.program).whole()
        if kernels is not None:
            was = self.program.kernels  # the process's settings stay
            self.program = self.program.with_kernels(
                was._replace(
                    num_multiprocessors=kernels.num_multiprocessors, capability=kernels.capability
                )
            )
        self.times_ms = (
            times_of(profile, self.program)
            if device is None
            else operation_times_ms(self.program, device)
        )
        self._stepper = StepPlanner(self.program, self.times_ms)
        self.host = host_costs_of(profile, self.program) if device is None else None
        """What a step costs the host; None: not known, or the host is the device."""
        self.link = link or _link_of(profile)
        self.is_elsewhere = device is not None or link is not None
        """True if it is not for what was profiled."""
        self.is_blocking = not self.is_elsewhere and profile.settings.get("transport") == BLOCKING
        """True if compute stands still while copies run, as where the host is the device."""
        self.window_bytes = window_bytes
        self.allocator = allocator

    def leaving(self, policy: Policy, keep_last_layers: int) -> list[bool]:
        """Return which slots of the step that was profiled leave under *policy*."""
        every = self.profile.settings.get("checkpoint_every", 0)
        levers = Levers(checkpoint_every=max(0, every) if isinstance(every, int) else 0)
        kept = levers.kept_layers(self.program.num_layers, keep_last_layers)
        return leaving(self.program, policy, kept)

    def hidden_bytes(self) -> int:
        """Return what the link carries while forward computes; 0 if that stands still meanwhile."""
        return 0 if self.is_blocking else hidden_bytes(self.program, self.times_ms, self.link)

    def carried_out(self, plan: Plan, *, min_bytes: int) -> PlannedStep:
        """Return the step with *plan* carried out, what it recomputes included.

        Raises:
            PlanError: it names sub-modules as a whole, or is for larger or other slots.
        """
        if plan.recomputed_modules:
            raise PlanError(
                "the plan recomputes sub-modules as a whole (recomputed_modules), and a prediction "
                "goes slot by slot: name their slots, or have `pyao estimate` record the model.",
                key="plan-invalid",
            )
        _check_model(plan, self.profile)
        planned = {
            (slot.name, layer): slot
            for slot in plan.slots
            for layer in (slot.layers if slot.layers is not None else [None])
        }
        known = {slot.name for slot in self.program.slots}
        for name, _ in planned:
            if name not in known:
                raise PlanError(
                    f"the plan names the slot {name!r}, which the profile has not.",
                    key="plan-other-model",
                )
        actions, otherwise = [], []
        for slot in self.program.slots:
            entry = planned.get((slot.name, slot.layer)) or planned.get((slot.name, None))
            action = plan.otherwise if entry is None else entry.action
            is_small = slot.nbytes < min_bytes and action != RECOMPUTE
            actions.append(KEEP if is_small else action)
            otherwise.append(plan.otherwise if entry is None else entry.otherwise)
        return self._stepper.plan(actions, plan.replayed_modules, otherwise)

    def outcome(self, step: PlannedStep | Sequence[bool]) -> Outcome:
        """Return what the step comes to; a sequence says of each slot whether it is offloaded."""
        if not isinstance(step, PlannedStep):
            step = PlannedStep(self.program, list(step), {}, self.times_ms)
        return Outcome(
            step,
            self.link,
            window_bytes=self.window_bytes,
            allocator=self.allocator,
            is_blocking=self.is_blocking,
            host=self.host,
        )

    def plan(
        self,
        name: str,
        step: PlannedStep | Sequence[bool],
        limit_bytes: int | None = None,
    ) -> PredictedPlan:
        """Return a plan's row; *limit_bytes*: what may be reserved, if that is known."""
        found = self.outcome(step)
        timed, memory = found.timed, found.memory
        cause = peak_cause(found.step.program, found.late)
        return PredictedPlan(
            name=name,
            step_ms=timed.step_ms,
            compute_ms=timed.compute_ms,
            stall_forward_ms=timed.stall_forward_ms,
            stall_backward_ms=timed.stall_backward_ms,
            peak_bytes=found.peak_bytes,
            peak_where=cause.place,
            peak_tensor=cause.tensor,
            next_peak_bytes=cause.next_peak_bytes,
            reserved_bytes=memory.reserved_within(math.inf if limit_bytes is None else limit_bytes),
            fits=None if limit_bytes is None else memory.fits(limit_bytes),
            host_bytes=timed.host_peak_bytes,
            offloaded_bytes=timed.offloaded_bytes,
        )

    def compared(self, leaves: Sequence[bool]) -> list[ComparedFigure]:
        """Return measured figures beside predicted ones, for what the profile ran with."""
        profile = self.profile
        if not profile.is_measured:
            return []
        found = self.outcome(leaves).timed
        num_layers = len(profile.layer_names)
        parts = (profile.layer_forward, profile.layer_backward)
        figures: list[tuple[str, str, float, float]] = []
        if all(parts) and profile.head is not None:
            inside_ms = sum(num_layers * each.mean_ms for each in parts if each is not None)
            figures.append(
                (
                    "layers, head and loss",
                    "ms",
                    inside_ms + profile.head.mean_ms,
                    self._inside_ms(found),
                )
            )
        metrics: Mapping[str, float] = profile.metrics
        for key, unit, predicted in (
            ("stall_forward_ms", "ms", found.stall_forward_ms),
            ("stall_backward_ms", "ms", found.stall_backward_ms),
            ("offloaded_bytes", "bytes", float(found.offloaded_bytes)),
            ("host_peak_bytes", "bytes", float(found.host_peak_bytes)),
        ):
            if key in metrics:
                figures.append((key, unit, metrics[key], predicted))
        if profile.peak_allocated_bytes is not None:
            peak = float(profile.peak_allocated_bytes)
            figures.append(("peak on the device", "bytes", peak, float(found.peak_bytes)))
        return [
            ComparedFigure(name=name, unit=unit, measured=measured, predicted=predicted)
            for name, unit, measured, predicted in figures
        ]

    def _inside_ms(self, found: Prediction) -> float:
        """Return the time from the first layer's forward to the end of its backward, in ms."""
        first = self.program.segments[0]
        last = self.program.segments[-1]
        times_ms = without_collectives(self.times_ms, self.program.operations)
        outside_ms = sum(
            sum(times_ms[segment.start : segment.end])
            for segment in (first, last)
            if segment.layer < 0
        )
        return found.step_ms - outside_ms


def _link_of(profile: Profile) -> LinkModel:
    d2h, h2d = (profile.link.get(f"{each}_gib_per_s") for each in ("d2h", "h2d"))
    if not d2h and not h2d:
        raise ForecastError(
            "the profile does not know the link's speed, since nothing was copied. State it "
            "(--link 25GiB/s, or --device).",
            key="speeds-unknown",
        )
    d2h, h2d = d2h or h2d, h2d or d2h
    assert d2h is not None
    assert h2d is not None
    if d2h <= 0 or h2d <= 0:
        raise ForecastError(
            f"the link of the profile has speeds of {d2h} and {h2d} GiB/s; expected more than 0.",
            key="speeds-unknown",
        )
    return LinkModel(d2h_gib_per_s=d2h, h2d_gib_per_s=h2d)


def _check_model(plan: Plan, profile: Profile) -> None:
    for key, value in plan.model.items():
        if profile.model.get(key) != value:
            raise PlanError(
                f"the plan was made for another model than the profile: its {key} is {value!r}, "
                f"and the profile's is {profile.model.get(key)!r}. Give a plan of the same model.",
                key="plan-other-model",
            )
