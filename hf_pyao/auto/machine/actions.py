"""Actions: what the machine wants done. Frozen values; ``driver`` performs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hf_pyao.auto.machine.states import Options, Ready, Target


@dataclass(frozen=True)
class Use:
    """Exchange the engine's policy, from the next forward on."""

    target: Target
    options: Options = Options.UNCHANGED
    ready: Ready | None = None
    resets_window: bool = False
    """True: the window is as configured again. A plan sets its own."""


@dataclass(frozen=True)
class Measure:
    """Measure the next micro-batches."""


@dataclass(frozen=True)
class CancelMeasuring:
    """Stop measuring."""


@dataclass(frozen=True)
class TimeMicroBatches:
    """Time the next micro-batches by a few marks."""

    is_of_plan: bool


@dataclass(frozen=True)
class StopTiming:
    """Stop that."""


@dataclass(frozen=True)
class ForgetForward:
    """Take the next forward for the first one of what is measured."""


@dataclass(frozen=True)
class MakePlan:
    """Make a plan for the state's question; answered by :class:`Planned` or :class:`NotPlanned`."""


@dataclass(frozen=True)
class Judge:
    """Compare what was timed with what was predicted; answered by :class:`Judged`."""


@dataclass(frozen=True)
class Tell:
    """Tell the other processes of the plan; None: that there is none."""

    ready: Ready | None


@dataclass(frozen=True)
class Keep:
    """Write the plan for the next run."""

    ready: Ready


@dataclass(frozen=True)
class Say:
    """Show a line to the user."""

    line: str
    key: str = ""
    """Of TROUBLESHOOTING.md; empty: the line is no warning."""


@dataclass(frozen=True)
class StreamAll:
    """Stream the frozen weights of all layers, from the next forward on."""


@dataclass(frozen=True)
class Answer:
    """What is done from now on, for whoever reported that memory ran out."""

    words: str


Action: TypeAlias = (
    Use
    | Measure
    | CancelMeasuring
    | TimeMicroBatches
    | StopTiming
    | ForgetForward
    | MakePlan
    | Judge
    | Tell
    | Keep
    | Say
    | StreamAll
    | Answer
)
