"""The step of a profile over time: as it was measured, and as it is predicted."""

from __future__ import annotations

from hf_pyao.config import PyAOConfig
from hf_pyao.engine.runtime.timeline import Span
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.step import StepReport
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.memory_snapshot import memory_snapshot
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.profiled_step import ProfiledStep
from hf_pyao.plan.predict.step_view import measured_step, predicted_step
from hf_pyao.plan.predictor.predicted_plans import as_profiled


def steps_of(profile: Profile) -> list[StepReport]:
    """Return the last micro-batch of *profile*, and what is predicted for it.

    Each as far as the profile has what it takes: a timeline, and the step itself.
    """
    found = []
    setup = {"shapes": profile.shapes, **profile.settings}
    if profile.timeline:
        spans = [Span(e.lane, e.label, e.start_ms, e.end_ms) for e in profile.timeline]
        found.append(
            measured_step(
                spans,
                title=f"{profile.title}: the last micro-batch, measured",
                device=profile.device,
                provenance=profile.provenance,
                metrics=profile.metrics,
                setup=setup,
            )
        )
    predicted = _predicted(profile)
    # Where copies block, compute does not run meanwhile: there are no lanes beside it.
    if predicted is None or ProfiledStep.of(profile).is_blocking:
        return found
    found.append(
        predicted_step(
            predicted.program,
            predicted.timed,
            title=f"{profile.title}: the same, predicted",
            device=profile.device,
            provenance=profile.provenance,
            setup=setup,
        )
    )
    return found


def snapshot_of(profile: Profile) -> bytes | None:
    """Return the memory of the step of *profile*, predicted for what left then.

    None: the profile has no step, or no speed of a link.
    """
    predicted = _predicted(profile)
    return None if predicted is None else memory_snapshot(predicted.program, predicted.late)


def _predicted(profile: Profile) -> Outcome | None:
    try:
        window = profile.settings.get("window")
        config = PyAOConfig(window=window if isinstance(window, int) else "layer")
        found = as_profiled(ProfiledStep.of(profile), PlanRequest.of_config(config))
    except PyAOError:
        return None
    return found
