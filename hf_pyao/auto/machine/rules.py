"""The rules of the machine: for a mode and an event, the next state and the actions."""

from __future__ import annotations

from dataclasses import replace

from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.states import (
    ALL_STREAMED,
    RUNG_WORDS,
    Mode,
    Options,
    Question,
    SetState,
    Source,
    State,
    Target,
    Times,
)
from hf_pyao.auto.machine.transitions import (
    Result,
    adopt,
    follow,
    give_up,
    measure_anew,
    publish,
    record,
    update,
    warn,
)

MOST_ROUNDS = 16
"""How often measuring may begin anew in a run: parameters may be frozen and thawed all the time."""

OTHERS_ARE_TRAINED = "other parameters are trained than it planned for"
NOT_FOLLOWED = "its plan cannot be followed any more"

# ---- attaching, and plans that are given ---------------------------------------------------------


def starts(state: State, event: on.Starts) -> Result:
    return update(state, mode=Mode.MEASURING), (do.Measure(),)


def unlimited(state: State, event: on.Unlimited) -> Result:
    state = replace(state, summary=event.summary)
    if not event.keeps_all:
        return state, ()
    return update(state, mode=Mode.KEEPING), (do.Use(Target.NOTHING),)


def plan_given(state: State, event: on.PlanGiven) -> Result:
    state, actions = follow(state, event.ready, event.how, event.source)
    return state, (do.CancelMeasuring(), *actions)


def gives_up(state: State, event: on.GivesUp) -> Result:
    return give_up(state, event.summary, do.CancelMeasuring())


# ---- which parameters are trained ----------------------------------------------------------------


def trained(state: State, event: on.Trained) -> Result:
    """Go over to another set of parameters, if that has lasted or the one before had."""
    if state.key is None:
        state = replace(state, key=event.key, first=event.key, num_forwards=1)
        is_other = state.now.ready is not None and not event.is_of_plan
        return measure_anew(state, OTHERS_ARE_TRAINED) if is_other else (state, ())
    differs = event.key != state.key
    if event.has_changed:
        is_over = differs and state.num_forwards >= state.patience
        state = replace(state, num_forwards=1)
    else:
        state = replace(state, num_forwards=state.num_forwards + 1)
        is_over = differs and state.num_forwards == state.patience
    return go_over(state, event.key) if is_over else (state, ())


def go_over(state: State, key: bytes) -> Result:
    known = state.before[1] if state.before is not None and state.before[0] == key else None
    before = None
    if state.key is not None:
        mode = Mode.GAVE_UP if state.now.ready is None else Mode.FOLLOWING
        before = state.key, replace(state.now, mode=mode, profile=None)
    state = replace(state, key=key, before=before, now=known or SetState(), num_forwards=1)
    if known is None or known.ready is None:
        state, actions = measure_anew(state, OTHERS_ARE_TRAINED)
        return state, (do.CancelMeasuring(), *actions)
    how = "the plan for the parameters that are trained again"
    state, actions = follow(state, known.ready, how, known.source, draft=known.draft)
    return state, (do.CancelMeasuring(), *actions, do.Say(state.summary))


# ---- measuring -----------------------------------------------------------------------------------


def measured_nothing(state: State, event: on.MeasuredNothing) -> Result:
    return state, (do.ForgetForward(),)


def profiled(state: State, event: on.Profiled) -> Result:
    if not event.is_first_rank:
        return replace(update(state, mode=Mode.LISTENING), hears=True), ()
    if not event.is_recorded:
        return record(state, Question(), profile=event.profile)
    state = update(state, mode=Mode.TIMING, profile=event.profile, num_forwards=0)
    return state, (do.TimeMicroBatches(is_of_plan=False),)


def timed_fallback(state: State, event: on.Timed) -> Result:
    times = Times(fallback=event.times)
    state, actions = record(state, Question(), times=times)
    return state, (do.StopTiming(), *actions)


def forward_while_timing(state: State, event: on.Forward) -> Result:
    """Wait for the times, but not for ever: some loops never end a micro-batch as it began."""
    num_forwards = state.now.num_forwards + 1
    state = update(state, num_forwards=num_forwards)
    if num_forwards <= 2 * state.patience:
        return state, ()
    return timed_fallback(state, on.Timed(()))


def failed_while_timing(state: State, event: on.Failed) -> Result:
    return timed_fallback(state, on.Timed(()))


# ---- a plan that is being made -------------------------------------------------------------------


def planned(state: State, event: on.Planned) -> Result:
    if event.key is not None and state.key is not None and event.key != state.key:
        before = state.before
        if before is not None and before[0] == event.key:
            before = None
        first = event.key if state.first == state.key else state.first
        state = replace(state, key=event.key, first=first, before=before)
    if event.cap_bytes is not None:
        state = update(state, cap_bytes=event.cap_bytes)
    is_after_memory = state.now.question.less_memory
    state, actions = adopt(state, event.ready, event.how, event.source, event.draft)
    return state, (*actions, do.Answer(event.ready.words)) if is_after_memory else actions


def not_planned(state: State, event: on.NotPlanned) -> Result:
    question, name = state.now.question, state.name
    if question.less_memory:
        return next_rung(state, on.OutOfMemory(question.runs_again))
    if question != Question():
        for_what = f"batches of {question.num_elements} elements"
        if question.is_withdrawn:
            for_what = "layers that run once"
        summary = f"policy {name!r} offloads everything: no plan was found for {for_what}"
        options = Options.CONFIGURED if question.is_withdrawn else Options.UNCHANGED
        back = do.Use(Target.CONFIGURED, options)
        line = warn("offloads-everything", f"{summary} ({event.why}).")
        return give_up(state, summary, do.StopTiming(), back, line)
    why = f"no plan was found ({event.why})" if event.is_error else event.why
    summary = f"policy {name!r} goes on offloading everything: {why}"
    return give_up(
        state,
        summary,
        do.Say(summary, "offloads-everything" if event.is_error else ""),
        do.Tell(None),
    )


def interrupted(state: State, event: on.Interrupted) -> Result:
    if state.now.ready is not None:
        return update(state, mode=Mode.FOLLOWING), (do.StopTiming(),)
    summary = f"policy {state.name!r} goes on offloading everything: {event.why}"
    back = do.Use(Target.CONFIGURED, Options.CONFIGURED)
    return give_up(state, summary, do.StopTiming(), back, do.Tell(None))


def failed_while_recording(state: State, event: on.Failed) -> Result:
    return not_planned(state, on.NotPlanned(event.error))


def second_run_after_interrupt(state: State, event: on.SecondRunWrong) -> Result:
    """Only after an interrupt in planning does this come in RECORDING."""
    state, actions = interrupted(state, on.Interrupted())
    has_plan = state.now.ready is not None
    state, more = (second_run_of_plan if has_plan else second_run_before_plan)(state, event)
    return state, (*actions, *more)


def out_of_memory_after_interrupt(state: State, event: on.OutOfMemory) -> Result:
    """Only after an interrupt in planning does this come in RECORDING."""
    state, actions = interrupted(state, on.Interrupted())
    state, more = out_of_memory(state, event)
    return state, (*actions, *more)


# ---- a plan that is followed ---------------------------------------------------------------------


def forward(state: State, event: on.Forward) -> Result:
    now = state.now
    if event.fits or state.hears or now.ready is None:
        return state, ()
    if now.source is Source.UNRECORDED:
        return measure_anew(state, "batches are larger than those that were measured")
    if now.source is Source.PLANNED and now.draft is not None:
        state, actions = record(state, Question(num_elements=event.num_elements))
        return state, (do.StopTiming(), *actions)
    summary = (
        f"policy {state.name!r} offloads everything: its plan is for batches of "
        f"{now.ready.num_elements} elements, and one of {event.num_elements} came. Delete the "
        "plan to have it made anew"
    )
    return give_up(
        state,
        summary,
        do.StopTiming(),
        do.Use(Target.CONFIGURED),
        warn("offloads-everything", f"{summary}."),
    )


def timed_plan(state: State, event: on.Timed) -> Result:
    state = update(state, mode=Mode.FOLLOWING)
    if not event.times:
        return state, (do.StopTiming(),)
    times = replace(state.now.times, plan=event.times, expected=event.expected)
    return update(state, times=times), (do.StopTiming(), do.Judge())


def judged(state: State, event: on.Judged) -> Result:
    """Follow the plan that corrected times lead to, or go back to what was faster."""
    actions: tuple[do.Action, ...] = ()
    corrected, lost = event.corrected, event.lost
    if corrected is not None:
        times = state.now.times
        if corrected.is_speed:
            times = replace(times, fallback=())
        if corrected.is_another:
            times = replace(times, before=times.plan)
        state = update(state, times=times, causes=state.now.causes | corrected.causes)
        ready, words = corrected.ready, corrected.words
        if corrected.is_another:
            return adopt(state, ready, words, Source.PLANNED, corrected.draft)
        how = f"{words}; no other plan would be faster"
        state, actions = follow(state, ready, how, Source.PLANNED, draft=corrected.draft)
        actions = (*actions, do.Say(state.summary), *publish(state, ready))
    if lost is None:
        return state, actions
    line = do.Say(
        f"policy {state.name!r} drops its plan, which takes {lost.plan_ms:.1f} ms or more where "
        f"{lost.name} took {lost.fallback_ms:.1f}."
    )
    how = f"its fallback, {lost.name}"
    state, more = follow(state, lost.ready, how, Source.PLANNED, draft=lost.draft)
    return state, (*actions, line, *more, *publish(state, lost.ready))


def refused(state: State, event: on.Refused) -> Result:
    line = warn(
        "plan-not-followed", f"policy {state.name!r} does not go on with its plan: {event.why}"
    )
    can_plan = state.now.source is Source.PLANNED and state.now.draft is not None
    if can_plan and not state.hears:
        state, actions = record(state, Question(is_withdrawn=True))
        return state, (line, do.StopTiming(), *actions)
    state, actions = measure_anew(state, NOT_FOLLOWED)
    return state, (line, *actions)


def failed(state: State, event: on.Failed) -> Result:
    state = update(state, mode=Mode.FOLLOWING, source=Source.GIVEN, draft=None)
    line = warn("plan-not-adopted", f"policy {state.name!r} keeps its plan: {event.error}")
    return state, (do.StopTiming(), line)


def only_warn(state: State, event: on.Failed) -> Result:
    return state, (
        warn("plan-not-adopted", f"policy {state.name!r} goes on as before: {event.error}"),
    )


def heard(state: State, event: on.Heard) -> Result:
    if event.ready is not None:
        return follow(state, event.ready, "the first process's plan", Source.HEARD)
    if state.now.ready is not None:
        return state, ()
    why = "the first process has no plan"
    return give_up(state, f"policy {state.name!r} goes on offloading everything: {why}")


# ---- second runs that went wrong -----------------------------------------------------------------


def second_run_of_plan(state: State, event: on.SecondRunWrong) -> Result:
    if not event.may_replan:
        return second_run_final(state, event)
    state = update(state, mode=Mode.ONCE, ready=None)
    return state, (do.StopTiming(), do.Use(Target.EVERYTHING, Options.ONCE))


def second_run_before_plan(state: State, event: on.SecondRunWrong) -> Result:
    """Go on: no layer runs again now. What went wrong ran under the plan before."""
    return (state, ()) if event.may_replan else second_run_final(state, event)


def second_run_final(state: State, event: on.SecondRunWrong) -> Result:
    return tighten(state, Target.EVERYTHING, Options.ONCE, event.why)


def forward_after_once(state: State, event: on.Forward) -> Result:
    if state.now.draft is None or state.hears:
        return measure_anew(state, NOT_FOLLOWED)
    return record(state, Question(is_withdrawn=True))


def failed_after_once(state: State, event: on.Failed) -> Result:
    summary = f"policy {state.name!r} offloads everything: {event.error}"
    back = do.Use(Target.CONFIGURED, Options.CONFIGURED)
    return give_up(state, summary, back, warn("offloads-everything", f"{summary}."))


# ---- out of memory -------------------------------------------------------------------------------


def out_of_memory(state: State, event: on.OutOfMemory) -> Result:
    if state.now.source is not Source.PLANNED or state.now.draft is None:
        return next_rung(state, event)
    state, actions = record(state, Question(less_memory=True, runs_again=event.runs_again))
    return state, (do.StopTiming(), *actions)


def next_rung(state: State, event: on.OutOfMemory) -> Result:
    """Stream all frozen weights; where they are streamed, take the next rung.

    Where layers run again already, recomputing would only hold more.
    """
    if event.can_stream_more:
        return state, (do.StreamAll(), do.Answer(ALL_STREAMED))
    skipped = (Target.RECOMPUTED,) if event.runs_again else ()
    left = [rung for rung in state.rungs if rung not in skipped]
    if not left:
        return state, ()
    rung = left[0]
    state = replace(state, rungs=tuple(left[1:]))
    why = "the device ran out of memory"
    state, actions = tighten(state, rung, Options.UNCHANGED, why)
    return state, (*actions, do.Answer(RUNG_WORDS[rung]))


def tighten(state: State, rung: Target, options: Options, why: str) -> Result:
    """Let a rung decide for the rest of the run."""
    state = update(state, mode=Mode.TIGHTENED, ready=None, draft=None, profile=None)
    state = replace(state, rung=rung)
    if state.summary or state.name == "auto":
        state = replace(state, summary=f"policy {state.name!r} has given way: {why}")
    return state, (do.CancelMeasuring(), do.StopTiming(), do.Use(rung, options))


def detached(state: State, event: on.Detached) -> Result:
    return update(state, mode=Mode.DETACHED), (do.StopTiming(),)
