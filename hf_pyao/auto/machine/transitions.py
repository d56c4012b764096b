"""Parts of the machine's rules: ways to go over to another mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine.states import (
    Mode,
    Options,
    Question,
    Ready,
    SetState,
    Source,
    State,
    Target,
)

Result: TypeAlias = tuple[State, tuple[do.Action, ...]]


def update(state: State, **changes: Any) -> State:
    return replace(state, now=replace(state.now, **changes))


def warn(key: str, line: str) -> do.Say:
    """Return a warning; *key* is of TROUBLESHOOTING.md."""
    return do.Say(line, key)


def follow(
    state: State,
    ready: Ready,
    how: str,
    source: Source,
    *,
    draft: Any = None,
    is_checked: bool = False,
) -> Result:
    """Follow a plan; time it if *is_checked*."""
    state = update(
        state,
        mode=Mode.CHECKING if is_checked else Mode.FOLLOWING,
        ready=ready,
        source=source,
        draft=draft,
        profile=None,
    )
    if how:
        state = replace(state, summary=f"policy {state.name!r} ({how}): {ready.words}")
    return state, (do.StopTiming(), do.Use(Target.PLAN, Options.PLAN, ready))


def publish(state: State, ready: Ready) -> tuple[do.Action, ...]:
    """Keep a plan for the next run, which begins as this one did, and tell the other processes."""
    is_first = state.key == state.first
    return (do.Keep(ready), do.Tell(ready)) if is_first else (do.Tell(ready),)


def adopt(state: State, ready: Ready, how: str, source: Source, draft: Any) -> Result:
    """Follow a plan that was made just now, tell of it, and time it if it changes anything."""
    is_checked = source is Source.PLANNED and not ready.keeps_all
    state, actions = follow(state, ready, how, source, draft=draft, is_checked=is_checked)
    actions = (*actions, do.Say(state.summary), *publish(state, ready))
    return state, (*actions, do.TimeMicroBatches(is_of_plan=True)) if is_checked else actions


def give_up(state: State, summary: str, *actions: do.Action) -> Result:
    """Go on with the configured policy."""
    if state.target is not Target.CONFIGURED and not any(isinstance(a, do.Use) for a in actions):
        actions = (do.Use(Target.CONFIGURED, Options.CONFIGURED), *actions)
    state = update(state, mode=Mode.GAVE_UP, ready=None, draft=None, profile=None)
    return replace(state, summary=summary), actions


def measure_anew(state: State, why: str) -> Result:
    """Let the configured policy decide, and make a plan from what the next micro-batches take."""
    state = replace(state, now=SetState(mode=Mode.MEASURING, cap_bytes=state.now.cap_bytes))
    back = do.Use(Target.CONFIGURED, Options.CONFIGURED, resets_window=True)
    exchange: tuple[do.Action, ...] = (do.StopTiming(), back)
    if not state.num_rounds_left:
        summary = (
            f"policy {state.name!r} goes on offloading everything: parameters were frozen and "
            "thawed too often for a plan each time"
        )
        return give_up(state, summary, *exchange, warn("offloads-everything", f"{summary}."))
    state = replace(state, num_rounds_left=state.num_rounds_left - 1, summary="")
    said = do.Say(f"policy {state.name!r} measures anew: {why}.")
    return state, (*exchange, said, do.ForgetForward(), do.Measure())


def record(state: State, question: Question, **changes: Any) -> Result:
    """Make a plan."""
    state = update(state, mode=Mode.RECORDING, question=question, **changes)
    return state, (do.MakePlan(),)
