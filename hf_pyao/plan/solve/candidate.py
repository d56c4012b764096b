"""A plan for a recorded step, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.plan.documents.plan_facts import KEEP_EVERYTHING
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.step.planned_step import PlannedStep
from hf_pyao.plan.step.prediction import Prediction

KEEP_ALL = KEEP_EVERYTHING
CHECKPOINT = "checkpointing"
LAYER_INPUTS = "offload the layers' inputs, recompute the rest"
OFFLOAD_ALL = "offload everything"
FIRST_CHECKPOINTED = "checkpointing of the first layers"
FIRST_OFFLOADED = "offload the first layers"
FIRST_RUN_AGAIN = "the first layers run again as a whole"
"""As the engine's segments of one layer, which take the host less than tracing operations."""
PLANNED = "planned"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan for a step, and what it comes to."""

    name: str
    actions: tuple[str, ...]
    """By slot of the step."""
    otherwise: tuple[str, ...]
    """By slot: what becomes of what is stored to rebuild it."""
    codecs: tuple[str | None, ...]
    """By slot; None: as the configuration says."""
    products: frozenset[str]
    """Sub-modules whose matrix products may run again."""
    keep_last_layers: int
    window_bytes: int | None
    outcome: Outcome
    """What it comes to."""
    num_checkpointed: int = 0
    """First layers that run again as a whole."""

    @property
    def step(self) -> PlannedStep:
        """The step with the plan carried out in it."""
        return self.outcome.step

    @property
    def timed(self) -> Prediction:
        """As :attr:`Outcome.timed`."""
        return self.outcome.timed

    @property
    def memory(self) -> StepMemory:
        """What the device's allocator reserves for it, and whether that fits."""
        return self.outcome.memory

    @property
    def step_ms(self) -> float:
        """Predicted time."""
        return self.outcome.step_ms

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of what is allocated on the device."""
        return self.outcome.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Predicted peak on the host, with the masters of streamed weights."""
        return self.outcome.host_bytes

    def rank(self, ratio: float = 1.0) -> tuple[float, int]:
        """Return what plans are ordered by, over a link *ratio* times as fast.

        Times that differ by less than a millionth are equal: the lower peak counts then.
        """
        return float(f"{self.outcome.step_ms_at(ratio):.6g}"), self.peak_bytes
