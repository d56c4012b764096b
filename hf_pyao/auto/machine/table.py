"""The machine that decides which policy an attached model follows: a pure table, without torch.

``next_state(state, event)`` returns the next state and the actions to perform. It performs nothing
and asks nothing: what it must know comes with the event. Each mode has a :class:`Rule` for the
events that change something in it. ``MACHINE.md`` beside this file is the table as a page.

A policy is in use because of exactly one thing at a time: see ``State.target``. Whenever a rule
changes the target, its actions hold the ``Use`` that brings it about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine import rules
from hf_pyao.auto.machine.states import Mode, State
from hf_pyao.auto.machine.transitions import Result


@dataclass(frozen=True)
class Rule:
    """What one mode does on one event."""

    handle: Callable[[State, Any], Result]
    to: tuple[Mode, ...]
    """Other modes that it may lead to."""
    words: str
    """What it does, for the page."""


def next_state(state: State, event: on.Event) -> Result:
    """Return the state after *event*, and what is to be done."""
    rule = TABLE[state.mode].get(type(event))
    return (state, ()) if rule is None else rule.handle(state, event)


_PLAN_MODES = (Mode.FOLLOWING, Mode.CHECKING)
_ANEW = (Mode.MEASURING, Mode.GAVE_UP)
_SETS = (*_ANEW, Mode.FOLLOWING)

_STARTS = Rule(rules.starts, (Mode.MEASURING,), "measure micro-batches")
_UNLIMITED = Rule(rules.unlimited, (Mode.OFF, Mode.KEEPING), "keep everything on a CPU")
_PLAN_GIVEN = Rule(rules.plan_given, (Mode.FOLLOWING,), "follow it")
_TRAINED = Rule(
    rules.trained, _SETS, "if another set lasts: follow the plan of that set, or measure anew"
)
_HEARD = Rule(rules.heard, (Mode.FOLLOWING, Mode.GAVE_UP), "follow it; without one, give up")
_NEXT_RUNG = Rule(
    rules.next_rung, (Mode.TIGHTENED,), "stream all frozen weights, or use the next rung"
)
_TIGHTER = Rule(
    rules.out_of_memory,
    (Mode.RECORDING, Mode.TIGHTENED),
    "make a tighter plan, or stream all frozen weights, or use the next rung",
)
_FINAL = Rule(rules.second_run_final, (Mode.TIGHTENED,), "run layers once, offload everything")
_NO_PLAN_YET = Rule(
    rules.second_run_before_plan, (Mode.TIGHTENED,), "run layers once, unless no layer runs again"
)
_WITHDRAWN = Rule(
    rules.second_run_of_plan, (Mode.ONCE, Mode.TIGHTENED), "run layers once, offload everything"
)
_FORWARD = Rule(
    rules.forward,
    (Mode.RECORDING, *_ANEW),
    "if the batch does not fit the plan: make one for larger batches, measure anew, or give up",
)
_REFUSED = Rule(
    rules.refused, (Mode.RECORDING, *_ANEW), "make a plan for layers that run once, or measure anew"
)
_KEEPS_PLAN = Rule(rules.failed, (Mode.FOLLOWING,), "keep the plan, and plan no more")
_WARNS = Rule(rules.only_warn, (), "warn")
_GIVES_UP = Rule(rules.gives_up, (Mode.GAVE_UP,), "give up")
_DETACHED = Rule(rules.detached, (Mode.DETACHED,), "stop timing")
_PREVIOUS = "go back to what decided before, then as there"

_BEFORE_PLAN: Mapping[type[on.Event], Rule] = {
    on.PlanGiven: _PLAN_GIVEN,
    on.Trained: _TRAINED,
    on.Heard: _HEARD,
    on.SecondRunWrong: _NO_PLAN_YET,
    on.OutOfMemory: _NEXT_RUNG,
    on.GivesUp: _GIVES_UP,
    on.Failed: _WARNS,
    on.Detached: _DETACHED,
}
_WITH_PLAN: Mapping[type[on.Event], Rule] = {
    on.PlanGiven: _PLAN_GIVEN,
    on.Trained: _TRAINED,
    on.Forward: _FORWARD,
    on.Heard: _HEARD,
    on.Refused: _REFUSED,
    on.SecondRunWrong: _WITHDRAWN,
    on.OutOfMemory: _TIGHTER,
    on.Failed: _KEEPS_PLAN,
    on.Detached: _DETACHED,
}
_WITHOUT_PLANNING: Mapping[type[on.Event], Rule] = {
    on.SecondRunWrong: _FINAL,
    on.OutOfMemory: _NEXT_RUNG,
    on.Detached: _DETACHED,
}

TABLE: Mapping[Mode, Mapping[type[on.Event], Rule]] = MappingProxyType(
    {
        Mode.OFF: {
            **_WITHOUT_PLANNING,
            on.Starts: _STARTS,
            on.Unlimited: _UNLIMITED,
            on.PlanGiven: _PLAN_GIVEN,
        },
        Mode.KEEPING: {**_WITHOUT_PLANNING, on.PlanGiven: _PLAN_GIVEN},
        Mode.MEASURING: {
            **_BEFORE_PLAN,
            on.Profiled: Rule(
                rules.profiled,
                (Mode.TIMING, Mode.RECORDING, Mode.LISTENING),
                "time micro-batches without the profiler; without a recorded step make a plan; "
                "in other processes listen",
            ),
            on.MeasuredNothing: Rule(rules.measured_nothing, (), "measure again"),
        },
        Mode.TIMING: {
            **_BEFORE_PLAN,
            on.Forward: Rule(
                rules.forward_while_timing, (Mode.RECORDING,), "after too many: make a plan"
            ),
            on.Timed: Rule(rules.timed_fallback, (Mode.RECORDING,), "make a plan"),
            on.Failed: Rule(rules.failed_while_timing, (Mode.RECORDING,), "make a plan"),
        },
        Mode.LISTENING: _BEFORE_PLAN,
        Mode.RECORDING: {
            on.PlanGiven: _PLAN_GIVEN,
            on.Planned: Rule(rules.planned, _PLAN_MODES, "follow it, tell it, time it"),
            on.NotPlanned: Rule(
                rules.not_planned, (Mode.GAVE_UP, Mode.TIGHTENED), "give up, or use the next rung"
            ),
            on.SecondRunWrong: Rule(
                rules.second_run_after_interrupt,
                (Mode.ONCE, Mode.GAVE_UP, Mode.TIGHTENED),
                _PREVIOUS,
            ),
            on.OutOfMemory: Rule(
                rules.out_of_memory_after_interrupt, (Mode.RECORDING, Mode.TIGHTENED), _PREVIOUS
            ),
            on.Interrupted: Rule(
                rules.interrupted,
                (Mode.FOLLOWING, Mode.GAVE_UP),
                "keep the plan before, or give up",
            ),
            on.Failed: Rule(
                rules.failed_while_recording, (Mode.GAVE_UP, Mode.TIGHTENED), "as without a plan"
            ),
            on.Detached: _DETACHED,
        },
        Mode.CHECKING: {
            **_WITH_PLAN,
            on.Timed: Rule(rules.timed_plan, (Mode.FOLLOWING,), "compare the times"),
        },
        Mode.FOLLOWING: {
            **_WITH_PLAN,
            on.Judged: Rule(
                rules.judged,
                _PLAN_MODES,
                "follow the corrected plan, or go back to what was faster",
            ),
        },
        Mode.ONCE: {
            on.PlanGiven: _PLAN_GIVEN,
            on.Trained: _TRAINED,
            on.Forward: Rule(
                rules.forward_after_once,
                (Mode.RECORDING, *_ANEW),
                "make a plan for layers that run once, or measure anew",
            ),
            on.Heard: _HEARD,
            on.SecondRunWrong: _NO_PLAN_YET,
            on.OutOfMemory: _NEXT_RUNG,
            on.Failed: Rule(rules.failed_after_once, (Mode.GAVE_UP,), "give up"),
            on.Detached: _DETACHED,
        },
        Mode.GAVE_UP: _BEFORE_PLAN,
        Mode.TIGHTENED: _WITHOUT_PLANNING,
        Mode.DETACHED: {},
    }
)
"""What each mode does on each event; an event that is not there changes nothing."""
