"""``PlanFacts``: the numbers of a plan that steer the run that follows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_pyao.errors import PyAOError

KEEP_EVERYTHING = "keep everything"
"""Name of the plan that moves nothing and drops nothing."""

PREDICTED = ("step_ms", "peak_bytes", "kept_step_ms", "kept_peak_bytes")
"""Facts of a prediction. A plan has all of them or none."""


class PlanError(PyAOError, ValueError):
    """A plan does not hold for this model, or contradicts itself."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan was made for, and what it is predicted to take.

    None stands for a number that is not known; each field says what is assumed then. A plan that
    is written by hand may leave all of them out.

    Raises:
        PlanError: a number is negative, or some of :data:`PREDICTED` are known and others are not.
    """

    num_elements: int | None = None
    """Elements of the input batch. None: the plan is followed for batches of every size."""
    trained: int | None = None
    """CRC-32 of the flags that say which parameters are trained. None: any parameters."""
    window_bytes: int | None = None
    """Size of the copy window. None: the configured one."""
    limit_bytes: int | None = None
    """Most bytes that the step may have had on the device, ``beside_bytes`` included. None: there
    was no limit, and the plan is not checked against one."""
    device_limit_bytes: int | None = None
    """Most bytes that the device had. None: the plan is kept on devices with more memory."""
    beside_bytes: int | None = None
    """Memory of tensors that are not part of the step. None: 0."""
    resident_bytes: int | None = None
    """Part of the peak that does not grow with the batch, such as weights. None: 0."""
    step_ms: float | None = None
    """Predicted time of a forward and backward. None: no prediction."""
    peak_bytes: int | None = None
    """Predicted peak on the device. None: no prediction."""
    needed_bytes: int | None = None
    """What the device's allocator needs for that peak. None: ``peak_bytes``."""
    host_bytes: int | None = None
    """Predicted peak on the host: activations, and masters of streamed weights. None: 0."""
    resident_blocks: int | None = None
    """Layers whose frozen weights stay on the device, where ``stream_weights`` is ``"auto"``; those
    of the others are streamed. None: the plan says nothing of that."""
    kept_step_ms: float | None = None
    """Predicted time of the step that keeps everything. None: no prediction."""
    kept_peak_bytes: int | None = None
    """Predicted peak of the step that keeps everything. None: no prediction."""
    kept_bound_bytes: int | None = None
    """Upper bound on the peak of the step that keeps everything, for a plan that was made without
    a recorded step. None: the step was recorded, or the plan was written by hand."""
    growth_exponent: float | None = None
    """Memory grows with the batch's elements to this power. None: 2."""

    def __post_init__(self) -> None:
        """Check the numbers; see the class docstring."""
        for name, value in self.known().items():
            if not 0 <= value < math.inf:
                raise PlanError(
                    f"the plan's fact {name!r} is {value:g}; expected a finite number that is not "
                    "negative. Make the plan anew.",
                    key="plan-invalid",
                )
        absent = [name for name in PREDICTED if getattr(self, name) is None]
        if absent and len(absent) < len(PREDICTED):
            raise PlanError(
                f"the plan's facts lack {absent[0]!r}; a prediction has all of "
                f"{', '.join(PREDICTED)}. Make the plan anew, or leave all of them out.",
                key="plan-invalid",
            )

    def known(self) -> dict[str, float]:
        """Return the numbers that are known, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def total_bytes(self) -> int:
        """What the device must have: the step and ``beside_bytes``; 0 if the peak is unknown."""
        own = self.peak_bytes if self.needed_bytes is None else self.needed_bytes
        return (own or 0) + (self.beside_bytes or 0)


NO_FACTS = PlanFacts()
"""Nothing is known."""

_NAMES_IN_VERSION_1 = {
    "trained_parameters": "trained",
    f"step_ms/{KEEP_EVERYTHING}": "kept_step_ms",
    f"peak_bytes/{KEEP_EVERYTHING}": "kept_peak_bytes",
    "kept_peak_bytes": "kept_bound_bytes",
}
"""Facts that had another name among the figures of version 1. The others kept theirs."""


def facts_of_version_1(figures: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the figures of a plan of schema version 1 into facts and the other figures.

    Version 1 wrote all numbers as floats, and a window of 0 bytes for the configured one. Values
    that are no numbers are returned as they are, for the reader to refuse.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(PlanFacts)}
    facts: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for old, value in figures.items():
        name = _NAMES_IN_VERSION_1.get(old, old)
        if name not in fields:
            others[old] = value
            continue
        is_whole = fields[name].startswith("int") and isinstance(value, float)
        facts[name] = int(value) if is_whole and math.isfinite(value) else value
    if not facts.get("window_bytes"):
        facts["window_bytes"] = None
    return facts, others
