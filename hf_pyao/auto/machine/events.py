"""Events: what the machine is told. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from hf_pyao.auto.machine.states import Ready, Source


@dataclass(frozen=True)
class Starts:
    """Attached with a policy that measures first."""


@dataclass(frozen=True)
class Unlimited:
    """Attached with policy ``auto`` where no limit of device memory is known."""

    summary: str
    keeps_all: bool
    """True on a CPU: then nothing is offloaded."""


@dataclass(frozen=True)
class PlanGiven:
    """There is a plan: from a file, a checkpoint, a search, or PyAO's rule."""

    ready: Ready
    how: str
    """Where from, for the summary; empty: there is no summary."""
    source: Source = Source.GIVEN


@dataclass(frozen=True)
class Trained:
    """Before a forward: which parameters are trained."""

    key: bytes
    has_changed: bool = False
    """True if the key differs from that of the forward before."""
    is_of_plan: bool = True
    """False if the plan that is followed was made for other parameters."""


@dataclass(frozen=True)
class Forward:
    """A forward is about to run."""

    num_elements: int
    fits: bool = True
    """False if the plan that is followed is not for batches this large."""


@dataclass(frozen=True)
class Profiled:
    """The micro-batches that are measured have run, and the step is recorded, if it could be."""

    profile: Any
    """None if nothing was measured."""
    is_recorded: bool
    is_first_rank: bool = True


@dataclass(frozen=True)
class MeasuredNothing:
    """Nothing was copied in what was measured: it is measured again."""


@dataclass(frozen=True)
class Timed:
    """As many micro-batches as wanted were timed."""

    times: Any
    expected: Any = None


@dataclass(frozen=True)
class Planned:
    """Answers :class:`MakePlan`."""

    ready: Ready
    draft: Any
    how: str
    """Which limit, or why: for the summary."""
    key: bytes | None = None
    """Of the parameters that are trained as the plan is made; None: as before."""
    cap_bytes: float | None = None
    source: Source = Source.PLANNED


@dataclass(frozen=True)
class NotPlanned:
    """Answers :class:`MakePlan`: there is no plan."""

    why: str
    is_error: bool = True
    """False where it is no surprise."""


@dataclass(frozen=True)
class Corrected:
    """A part of :class:`Judged`: predicted times were off, and were corrected."""

    ready: Ready
    draft: Any
    words: str
    causes: frozenset[str]
    is_another: bool
    """True if the corrected times lead to another plan."""
    is_speed: bool = False
    """True if compute runs at another speed: what was timed before is no measure any more."""


@dataclass(frozen=True)
class Lost:
    """A part of :class:`Judged`: the plan is slower than what it replaced."""

    ready: Ready
    draft: Any
    name: str
    """Of what is followed instead."""
    plan_ms: float
    fallback_ms: float


@dataclass(frozen=True)
class Judged:
    """Answers :class:`Judge`."""

    corrected: Corrected | None = None
    lost: Lost | None = None


@dataclass(frozen=True)
class Heard:
    """The first process told its plan, or that it has none."""

    ready: Ready | None


@dataclass(frozen=True)
class Refused:
    """Layers may not run again as the plan has it."""

    why: str


@dataclass(frozen=True)
class SecondRunWrong:
    """The second run of a layer gave other tensors than the first."""

    may_replan: bool
    """True if a plan without second runs is possible: the user asked for none."""
    why: str


@dataclass(frozen=True)
class OutOfMemory:
    """A micro-batch did not fit, and can run again."""

    runs_again: bool = False
    """True if layers run again as a whole already."""
    can_stream_more: bool = False
    """True if frozen weights are on the device that could be streamed."""


@dataclass(frozen=True)
class GivesUp:
    """Whoever measures cannot decide."""

    summary: str


@dataclass(frozen=True)
class Interrupted:
    """A plan that was being made did not come to be followed, and is forgotten."""

    why: str = "planning was interrupted"


@dataclass(frozen=True)
class Failed:
    """An error came while the next forward was prepared."""

    error: str


@dataclass(frozen=True)
class Detached:
    """The model is detached."""


Event: TypeAlias = (
    Starts
    | Unlimited
    | PlanGiven
    | Trained
    | Forward
    | Profiled
    | MeasuredNothing
    | Timed
    | Planned
    | NotPlanned
    | Judged
    | Heard
    | Refused
    | SecondRunWrong
    | OutOfMemory
    | GivesUp
    | Interrupted
    | Failed
    | Detached
)
