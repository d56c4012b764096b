"""One step of an estimate over time: of the way that is asked for, or that the verdict names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.plan.documents.estimate import EstimateReport, EstimateRow
from hf_pyao.plan.documents.step import StepReport
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.predict.step_view import predicted_step
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.verdict_text import named_row
from hf_pyao.tools.estimate.ways import METHODS


def check_method(method: str | None) -> None:
    """Refuse what is no way to train; None is fine.

    Raises:
        ConfigError: it is none; names the nearest.
    """
    if method is not None and method not in METHODS:
        raise unknown_name("way to train", method, METHODS)


def step_of(
    report: EstimateReport,
    config: Any,
    hardware: Hardware,
    options: Mapping[str, Any],
    method: str | None = None,
) -> StepReport:
    """Return a step of one way, at the micro-batch that *report* has its figures for.

    Args:
        report: the estimate of all ways.
        config: the model's transformers configuration.
        hardware: the card.
        options: keyword arguments of :class:`~hf_pyao.tools.estimate.estimate.Estimator`, as the
            report was made with.
        method: one of :data:`METHODS`; None: the one that the verdict names.

    Raises:
        ConfigError: the report has no such row, since the model keeps its own loss.
    """
    row = _row(report, method)
    estimator = Estimator(config, hardware, **options)
    predicted, _ = estimator.predicted(METHODS[row.method], row.micro_batch)
    model = report.setup["model"]["name"]
    return predicted_step(
        predicted.program,
        predicted.timed,
        title=f"One step of {model} on {hardware.name}: {row.method}, micro-batch "
        f"{row.micro_batch} x {estimator.sequence_length} tokens",
        device=hardware.name,
        provenance=report.provenance,
        limit_bytes=estimator.limit_bytes,
        late_peak_bytes=predicted.peak_bytes,
        setup={**report.setup, "method": row.method, "micro_batch": row.micro_batch},
    )


def _row(report: EstimateReport, method: str | None) -> EstimateRow:
    if method is None:
        return named_row(report.rows)
    found = [row for row in report.rows if row.method == method]
    if not found:
        known = ", ".join(row.method for row in report.rows)
        raise ConfigError(
            f"--step-method is {method!r}, which this model has no row for: its head is none that "
            f"the chunked loss understands. Rows: {known}.",
            key="setting-value",
        )
    return found[0]
