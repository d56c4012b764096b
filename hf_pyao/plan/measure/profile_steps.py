"""The step of a profile over time: as it was measured, and as it is predicted."""

from __future__ import annotations

from hf_pyao.engine.runtime.timeline import Span
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.step import StepReport
from hf_pyao.plan.predict.forecast import Forecast
from hf_pyao.plan.predict.predicted_plans import leaves_as_profiled
from hf_pyao.plan.predict.step_view import measured_step, predicted_step


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
    try:
        window = profile.settings.get("window")
        forecast = Forecast(profile, window_bytes=window if isinstance(window, int) else None)
        prediction = forecast.outcome(leaves_as_profiled(forecast)).timed
    except PyAOError:  # no step in it, or no speed of a link
        return found
    if forecast.is_blocking:  # where copies run, compute does not: there are no lanes beside it
        return found
    found.append(
        predicted_step(
            forecast.program,
            prediction,
            title=f"{profile.title}: the same, predicted",
            device=profile.device,
            provenance=profile.provenance,
            setup=setup,
        )
    )
    return found
