"""The plans that a forecast is asked for by default, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_pyao.config import DEFAULT_KEEP_LAST_LAYERS, DEFAULT_MIN_BYTES
from hf_pyao.engine.runtime.policy import OffloadAll
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.prediction import PredictionReport
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.plan.policies.budget import OffloadBudget
from hf_pyao.plan.predict.forecast import Forecast
from hf_pyao.plan.step.planned_step import PlannedStep
from hf_pyao.text import echo


def prediction_of(
    forecast: Forecast,
    plans: Mapping[str, Plan],
    *,
    limit_bytes: int | None,
    device_name: str,
) -> PredictionReport:
    """Return keeping everything, offloading everything, what hides under forward, and *plans*.

    Args:
        forecast: the profiled step.
        plans: more plans, by name.
        limit_bytes: memory of the device, if that is known.
        device_name: what the times are of.

    Raises:
        PlanError: a plan cannot be predicted, or is not for this step.
    """
    profile = forecast.profile
    min_bytes, keep_last_layers = DEFAULT_MIN_BYTES, DEFAULT_KEEP_LAST_LAYERS
    everything = forecast.leaving(OffloadAll(min_bytes), keep_last_layers)
    hidden_bytes = forecast.hidden_bytes()
    found: dict[str, PlannedStep | Sequence[bool]] = {
        "keep everything": [False] * len(everything),
        "policy all": everything,
        f"policy budget, {hidden_bytes / 1e9:.3g} GB": forecast.leaving(
            OffloadBudget(min_bytes, max_bytes=hidden_bytes), keep_last_layers
        ),
        **{name: forecast.carried_out(plan, min_bytes=min_bytes) for name, plan in plans.items()},
    }
    link = forecast.link
    blocks = ", and compute stands still meanwhile" if forecast.is_blocking else ""
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
        plans=[forecast.plan(name, leaves, limit_bytes) for name, leaves in found.items()],
        compared=[] if forecast.is_elsewhere else forecast.compared(leaves_as_profiled(forecast)),
        notes=_notes(profile),
        provenance=collect_provenance(),
    )


def leaves_as_profiled(forecast: Forecast) -> list[bool]:
    """Return which slots left while the profile was made.

    Raises:
        ReportError: the profile does not say.
    """
    settings = forecast.profile.settings
    if settings.get("policy") == "off":
        return [False] * len(forecast.program.slots)
    min_bytes, keep_last_layers = (
        settings.get(name, 0) for name in ("min_bytes", "keep_last_layers")
    )
    if not isinstance(min_bytes, int) or not isinstance(keep_last_layers, int):
        raise ReportError(
            f"the profile is damaged: its settings hold min_bytes {echo(str(min_bytes))} and "
            f"keep_last_layers {echo(str(keep_last_layers))}, expected whole numbers. Make it "
            "anew.",
            key="file-damaged",
        )
    return forecast.leaving(OffloadAll(min_bytes), keep_last_layers)


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
