"""Predicts a profiled step under plans: arithmetic on a profile of either kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hf_pyao.engine.runtime.policy import OffloadAll, OffloadNothing
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.documents.prediction import ComparedFigure, PredictedPlan, PredictionReport
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.plan.policies.budget import OffloadBudget, hidden_bytes
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.peak_cause import peak_cause
from hf_pyao.plan.predict.profiled_step import ProfiledStep
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.text import echo


def prediction_of(
    profiled: ProfiledStep,
    binds: PlanRequest,
    plans: Mapping[str, Plan],
    *,
    limit_bytes: int | None,
    device_name: str,
) -> PredictionReport:
    """Return keeping everything, offloading everything, what hides under forward, and *plans*.

    Args:
        profiled: the step.
        binds: what is offloaded at all. Its levers are those that the step was profiled with.
        plans: more plans, by name.
        limit_bytes: memory of the device, if that is known.
        device_name: what the times are of.

    Raises:
        PlanError: a plan cannot be predicted, or is not for this step.
    """
    profile, link = profiled.profile, profiled.link
    most_bytes = hidden_bytes(profiled.program, profiled.times_ms, link)
    most_bytes = 0 if profiled.is_blocking else most_bytes
    for plan in plans.values():
        _check_model(plan, profile)
    ways = [
        Way("keep everything"),
        Way("policy all", "all"),
        Way(
            f"policy budget, {most_bytes / 1e9:.3g} GB",
            OffloadBudget(binds.min_bytes, max_bytes=most_bytes),
        ),
        *(Way(name, plan=plan) for name, plan in plans.items()),
    ]
    predictor = Predictor.of_profile(profiled, binds)
    blocks = ", and compute stands still meanwhile" if profiled.is_blocking else ""
    source = "as it was profiled" if profile.device == device_name else "by its data sheet"
    return PredictionReport(
        title=f"{profile.title}: plans",
        summary=(
            f"Times of {device_name}, {source}; link {link.d2h_gib_per_s:.3g} GiB/s to the host, "
            f"{link.h2d_gib_per_s:.3g} back{blocks}. Weights and gradients are in the peak, the "
            "optimizer's states are not."
        ),
        profile={
            "title": profile.title,
            "device": profile.device,
            "is_measured": profile.is_measured,
            "shapes": profile.shapes,
            "model": profile.model,
        },
        plans=[_row(way.name, predictor.at(1, way), limit_bytes) for way in ways],
        compared=[] if profiled.is_elsewhere else compared(profiled, binds),
        notes=_notes(profile),
        provenance=collect_provenance(),
    )


def as_profiled(profiled: ProfiledStep, binds: PlanRequest) -> Outcome:
    """Return what is predicted for what left while the profile was made.

    Raises:
        ReportError: the profile does not say.
    """
    settings = profiled.profile.settings
    if settings.get("policy") == "off":
        policy: OffloadAll | OffloadNothing = OffloadNothing()
    else:
        names = ("min_bytes", "keep_last_layers")
        min_bytes, keep_last_layers = (settings.get(name, 0) for name in names)
        if not isinstance(min_bytes, int) or not isinstance(keep_last_layers, int):
            raise ReportError(
                f"the profile is damaged: its settings hold min_bytes {echo(str(min_bytes))} and "
                f"keep_last_layers {echo(str(keep_last_layers))}, expected whole numbers. Make it "
                "anew.",
                key="file-damaged",
            )
        policy = OffloadAll(min_bytes)
        binds = dataclasses.replace(binds, keep_last_layers=keep_last_layers)
    return Predictor.of_profile(profiled, binds).at(1, Way("as profiled", policy))


def levers_profiled(profile: Profile) -> Levers:
    """Return the levers that decide which of the last layers' slots stay."""
    every = profile.settings.get("checkpoint_every", 0)
    return Levers(checkpoint_every=max(0, every) if isinstance(every, int) else 0)


def compared(profiled: ProfiledStep, binds: PlanRequest) -> list[ComparedFigure]:
    """Return measured figures beside predicted ones, for what the profile ran with."""
    profile = profiled.profile
    outcome = as_profiled(profiled, binds)
    if not profile.is_measured:
        return []
    found = outcome.timed
    num_layers = len(profile.layer_names)
    parts = (profile.layer_forward, profile.layer_backward)
    figures: list[tuple[str, str, float, float]] = []
    if all(parts) and profile.head is not None:
        inside_ms = sum(num_layers * each.mean_ms for each in parts if each is not None)
        measured_ms = inside_ms + profile.head.mean_ms
        predicted_ms = found.step_ms - _outside_ms(profiled)
        figures.append(("layers, head and loss", "ms", measured_ms, predicted_ms))
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


def _row(name: str, found: Outcome, limit_bytes: int | None) -> PredictedPlan:
    timed, memory = found.timed, found.memory
    cause = peak_cause(found.program, found.late)
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


def _outside_ms(profiled: ProfiledStep) -> float:
    """Return the time before the first layer's forward and after the end of its backward, in ms."""
    program = profiled.program
    times_ms = without_collectives(profiled.times_ms, program.operations)
    return sum(
        sum(times_ms[segment.start : segment.end])
        for segment in (program.segments[0], program.segments[-1])
        if segment.layer < 0
    )


def _check_model(plan: Plan, profile: Profile) -> None:
    for key, value in plan.model.items():
        if profile.model.get(key) != value:
            raise PlanError(
                f"the plan was made for another model than the profile: its {key} is {value!r}, "
                f"and the profile's is {profile.model.get(key)!r}. Give a plan of the same model.",
                key="plan-other-model",
            )


def _notes(profile: Profile) -> list[str]:
    rates = {
        module.path: module.throughput_gib_per_s
        for module in profile.modules
        if module.throughput_gib_per_s is not None
    }
    speed = profile.link_gib_per_s
    notes = []
    if rates and speed and not profile.settings.get("checkpoint_every"):
        flagged = ", ".join(find_outliers(rates, speed).flagged) or "nothing"
        notes.append(
            f"PyAO's rule would recompute {flagged} (policy 'pyao'): `pyao estimate` predicts it, "
            "and `pyao plan` finds the fastest plan."
        )
    if not profile.is_measured:
        notes.append("The profile is predicted: no figure here was measured.")
    elif profile.settings.get("policy") not in ("all", "off"):
        notes.append(
            f"It was profiled with policy {profile.settings.get('policy')!r}; what is compared is "
            "predicted for policy 'all'."
        )
    return notes
