"""States of the machine that decides which policy a model follows.

All of them are frozen values. Plans, drafts, times and profiles are opaque here: the machine passes
them on and never looks inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any


class Mode(Enum):
    """What the machine is doing; the value is its description on the page."""

    OFF = "The configured policy decides. Nothing is measured or planned."
    KEEPING = "Everything stays on the device: on a CPU without a limit there is nothing to free."
    MEASURING = "The configured policy decides while micro-batches are measured."
    TIMING = "The same, without the profiler: micro-batches are timed as a plan will be."
    LISTENING = "The configured policy decides until the first process tells its plan."
    RECORDING = "A plan is being made. What decided before still decides."
    CHECKING = "A plan decides, and its micro-batches are timed."
    FOLLOWING = "A plan decides."
    ONCE = "Layers run once and everything is offloaded, until the next forward has a plan."
    GAVE_UP = "The configured policy decides. There is no plan for the trained parameters."
    TIGHTENED = "A rung of the ladder decides for the rest of the run."
    DETACHED = "The model is detached. Nothing changes any more."


class Source(Enum):
    """Where the plan that is followed comes from, and so what can be done when it stops fitting."""

    PLANNED = "made in this run from a recorded step; it can be made anew from that step"
    UNRECORDED = "made in this run without a recorded step; it can be measured anew"
    GIVEN = "read from a file, a checkpoint or a search; it cannot be made anew"
    HEARD = "told by the first process, which also makes the next one"


class Target(Enum):
    """Which policy the engine uses."""

    CONFIGURED = "as configured"
    NOTHING = "keep everything"
    PLAN = "the plan"
    EVERYTHING = "offload everything"
    RECOMPUTED = "recompute all that can be, offload the rest"
    WAITING = "offload everything, and wait for every copy"


class Options(Enum):
    """With which options of the step (segments, tiles, groups) the next forward runs."""

    UNCHANGED = "unchanged"
    CONFIGURED = "as configured"
    PLAN = "of the plan"
    ONCE = "each layer once"


ALL_STREAMED = (
    "the frozen weights of all layers are streamed from the host; where they were already, those "
    "of embeddings and head are on the host"
)
"""What is done first, to follow "from now on"."""

RUNG_WORDS: Mapping[Target, str] = MappingProxyType(
    {
        Target.EVERYTHING: "everything that the layers save is offloaded",
        Target.RECOMPUTED: (
            "all that can be computed again from the layers' inputs is recomputed, and what else "
            "they save is offloaded"
        ),
        Target.WAITING: (
            "everything that the layers save is offloaded, nothing is brought back ahead of its "
            "use, and compute waits for every copy"
        ),
    }
)
"""What a rung of the ladder does, to follow "from now on"."""


@dataclass(frozen=True)
class Ready:
    """A plan that was checked and may be followed."""

    plan: Any
    words: str
    """What it does, in one line."""
    options: Any = None
    """With which its step runs."""
    num_elements: int = 0
    """Of the batch that it is for; 0 if it does not say."""
    keeps_all: bool = False
    """True if it leaves every saved tensor where it is."""


@dataclass(frozen=True)
class Times:
    """What micro-batches took; each a sequence, empty where none was timed."""

    fallback: Any = ()
    """With the configured policy."""
    plan: Any = ()
    """With the plan that was timed last."""
    before: Any = ()
    """With the plan that this one replaced since times were off."""
    expected: Any = None
    """What was predicted for :attr:`plan`."""


@dataclass(frozen=True)
class Question:
    """What a plan is made for: as it stands, the step that was measured, in what the device has."""

    num_elements: int = 0
    """Of a larger batch, whose step is planned for instead; 0: none."""
    less_memory: bool = False
    """Within less than the plan needs that ran out of memory."""
    runs_again: bool = False
    """True if layers ran again as a whole then."""
    is_withdrawn: bool = False
    """Layers may not run again as the plan before had it."""


@dataclass(frozen=True)
class SetState:
    """What is known and done for one set of trained parameters."""

    mode: Mode = Mode.OFF
    ready: Ready | None = None
    """The plan that is followed; None in modes in which no plan decides."""
    source: Source = Source.GIVEN
    draft: Any = None
    """What a plan can be made anew from; None if it cannot."""
    profile: Any = None
    """What was measured; None before, and once a plan was made from it."""
    question: Question = Question()
    """What a plan is being made for, in RECORDING."""
    num_forwards: int = 0
    """Since timing began, in TIMING."""
    times: Times = Times()
    causes: frozenset[str] = frozenset()
    """Causes for which times were corrected: each is corrected once."""
    cap_bytes: float = float("inf")
    """Less than the device was planned to hold when it ran out of memory."""


@dataclass(frozen=True)
class State:
    """All that the machine knows."""

    now: SetState = SetState()
    """Of the parameters that are trained."""
    name: str = ""
    """Of the policy that plans: ``auto`` or ``pyao``; empty where the user's own decides."""
    summary: str = ""
    """What was decided, in one line for the user; nothing reads it to decide."""
    key: bytes | None = None
    """Which parameters are trained: a byte for each; None before the first forward."""
    first: bytes | None = None
    """The same when the run began."""
    before: tuple[bytes, SetState] | None = None
    """The set that was trained before, and what is known for it; that of turns is gone back to."""
    num_forwards: int = 0
    """Since other parameters are trained than before, or since the set changed."""
    patience: int = 2
    """Forwards over which the same parameters must be trained for a change to count."""
    num_rounds_left: int = 0
    """How often measuring may begin anew."""
    hears: bool = False
    """True if the first process makes the plans, and tells them."""
    rungs: tuple[Target, ...] = ()
    """Rungs of the ladder that are left."""
    rung: Target | None = None
    """The one that decides; None before TIGHTENED."""

    @property
    def mode(self) -> Mode:
        """What the machine is doing."""
        return self.now.mode

    @property
    def target(self) -> Target:
        """The one policy that decides."""
        if self.rung is not None:
            return self.rung
        if self.mode is Mode.KEEPING:
            return Target.NOTHING
        if self.mode is Mode.ONCE:
            return Target.EVERYTHING
        is_withdrawn = self.mode is Mode.RECORDING and self.now.question.is_withdrawn
        if is_withdrawn and self.now.ready is None:
            return Target.EVERYTHING
        return Target.CONFIGURED if self.now.ready is None else Target.PLAN
