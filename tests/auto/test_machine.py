"""The machine as a table: every mode answers every event, and one policy is in use at a time."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest

from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.rules import MOST_ROUNDS
from hf_pyao.auto.machine.states import (
    Mode,
    Options,
    Question,
    Ready,
    Source,
    State,
    Target,
)
from hf_pyao.auto.machine.table import TABLE, next_state
from tests.auto.machine_page import PAGE, page

LADDER = (Target.RECOMPUTED, Target.WAITING)
AUTO = State(name="auto", num_rounds_left=MOST_ROUNDS, rungs=LADDER, patience=4)
EVENTS = get_args(on.Event)
A, B, C = b"\1\1", b"\0\1", b"\1\0"


def ready(name: str = "plan", **more: Any) -> Ready:
    return Ready(plan=name, words=f"does {name}", num_elements=8, **more)


def run(state: State, *events: on.Event) -> tuple[State, list[do.Action]]:
    """Return the state after all *events*, and the actions of the last one."""
    actions: tuple[do.Action, ...] = ()
    for event in events:
        state, actions = next_state(state, event)
    return state, list(actions)


def of(actions: list[do.Action], kind: type[Any]) -> Any:
    """Return the one action of a kind."""
    (found,) = [each for each in actions if isinstance(each, kind)]
    return found


def planned(name: str = "plan", **more: Any) -> on.Planned:
    return on.Planned(ready(name), draft=f"draft of {name}", how="it fits", **more)


MEASURED = (on.Starts(), on.Trained(A), on.Profiled("profile", is_recorded=True))
CHECKED = (*MEASURED, on.Timed([3.0]), planned())


# ---- the table -----------------------------------------------------------------------------------


def test_every_mode_has_its_rules() -> None:
    assert set(TABLE) == set(Mode)
    assert set().union(*TABLE.values()) == set(EVENTS), "an event that no mode answers"


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.auto.machine_page`"


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import hf_pyao.auto.machine.table;"
        "assert not [n for n in sys.modules if n.startswith('hf_pyao.') and '.auto' not in n and n != 'hf_pyao.version']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- from attaching to a plan --------------------------------------------------------------------


def test_it_measures_times_plans_and_checks() -> None:
    state, actions = run(AUTO, on.Starts())
    assert state.mode is Mode.MEASURING and actions == [do.Measure()]
    state, actions = run(state, on.Trained(A), on.Profiled("profile", is_recorded=True))
    assert state.mode is Mode.TIMING and of(actions, do.TimeMicroBatches).is_of_plan is False
    state, actions = run(state, on.Timed([3.0]))
    assert state.mode is Mode.RECORDING and state.now.times.fallback == [3.0]
    assert of(actions, do.MakePlan) and state.now.question == Question()
    state, actions = run(state, planned())
    assert state.mode is Mode.CHECKING and state.target is Target.PLAN
    assert of(actions, do.Use) == do.Use(Target.PLAN, Options.PLAN, ready())
    assert of(actions, do.Tell).ready == of(actions, do.Keep).ready == ready()
    assert of(actions, do.TimeMicroBatches).is_of_plan
    assert of(actions, do.Say).line == state.summary == "policy 'auto' (it fits): does plan"
    state, actions = run(state, on.Timed([2.0], expected="predicted"))
    assert state.mode is Mode.FOLLOWING and actions[-1] == do.Judge()
    assert state.now.times.plan == [2.0] and state.now.times.fallback == [3.0]


def test_a_plan_that_keeps_everything_is_not_timed() -> None:
    kept = replace(planned(), ready=ready(keeps_all=True))
    state, actions = run(AUTO, *CHECKED[:-1], kept)
    assert state.mode is Mode.FOLLOWING
    assert not [each for each in actions if isinstance(each, do.TimeMicroBatches)]


def test_timing_does_not_wait_for_ever() -> None:
    state, _ = run(AUTO, *MEASURED)
    for _ in range(2 * AUTO.patience):
        state, actions = run(state, on.Forward(8))
        assert state.mode is Mode.TIMING and not actions
    state, actions = run(state, on.Forward(8))
    assert state.mode is Mode.RECORDING and state.now.times.fallback == ()


def test_without_a_recorded_step_it_plans_without_timing() -> None:
    state, actions = run(AUTO, on.Starts(), on.Profiled("profile", is_recorded=False))
    assert of(actions, do.MakePlan) and state.now.question == Question()
    gave_up, actions = run(state, on.NotPlanned("it is compiled", is_error=False))
    assert gave_up.mode is Mode.GAVE_UP and gave_up.target is Target.CONFIGURED
    assert not of(actions, do.Say).key and of(actions, do.Tell).ready is None
    assert "goes on offloading everything: it is compiled" in gave_up.summary
    kept = replace(planned(), source=Source.UNRECORDED, draft=None)
    state, actions = run(state, kept)
    assert state.mode is Mode.FOLLOWING
    state, actions = run(state, on.Forward(9, fits=False))
    assert state.mode is Mode.MEASURING and of(actions, do.Use).target is Target.CONFIGURED


def test_other_processes_listen_to_the_first() -> None:
    state, actions = run(
        AUTO, on.Starts(), on.Trained(A), on.Profiled(None, False, is_first_rank=False)
    )
    assert state.mode is Mode.LISTENING and state.hears and not actions
    none, _ = run(state, on.Heard(None))
    assert none.mode is Mode.GAVE_UP and "the first process has no plan" in none.summary
    for before in (state, none):
        after, actions = run(before, on.Heard(ready()))
        assert after.mode is Mode.FOLLOWING and of(actions, do.Use).ready == ready()
        assert run(after, on.Forward(99, fits=False)) == (after, [])  # the first process decides
        assert run(after, on.Heard(None)) == (after, [])
        again, _ = run(after, on.Refused("of a hook"))
        assert again.mode is Mode.MEASURING


def test_an_interrupt_in_planning_leaves_what_decided_before() -> None:
    state, actions = run(AUTO, *CHECKED[:-1], on.Interrupted())
    assert state.mode is Mode.GAVE_UP and of(actions, do.Tell).ready is None
    state, _ = run(AUTO, *CHECKED, on.Forward(9, fits=False))
    assert state.mode is Mode.RECORDING and state.target is Target.PLAN
    state, _ = run(state, on.Interrupted())
    assert state.mode is Mode.FOLLOWING and state.now.ready == ready()
    state, actions = run(state, on.Forward(9, fits=False))
    assert of(actions, do.MakePlan) and state.now.question == Question(num_elements=9)


# ---- plans that stop fitting ---------------------------------------------------------------------


def test_larger_batches_get_a_plan_of_their_own_or_none() -> None:
    state, actions = run(AUTO, *CHECKED, on.Forward(9, fits=False))
    assert of(actions, do.MakePlan) and state.now.question == Question(num_elements=9)
    larger, _ = run(state, planned("larger"))
    assert larger.now.ready == ready("larger") and larger.mode is Mode.CHECKING
    none, actions = run(state, on.NotPlanned("the step is damaged"))
    assert none.mode is Mode.GAVE_UP and of(actions, do.Use).target is Target.CONFIGURED
    assert "batches of 9 elements" in none.summary
    assert not [each for each in actions if isinstance(each, do.Tell)]  # others would follow it


def test_a_plan_of_a_file_is_left_for_larger_batches() -> None:
    state, actions = run(AUTO, on.PlanGiven(ready(), "the plan of a file"), on.Trained(A))
    assert state.mode is Mode.FOLLOWING and state.summary.startswith("policy 'auto' (the plan of")
    state, actions = run(state, on.Forward(9, fits=False))
    assert state.mode is Mode.GAVE_UP and of(actions, do.Say).key == "offloads-everything"
    assert "Delete the plan" in state.summary


def test_a_plan_for_other_parameters_is_made_anew() -> None:
    given = on.PlanGiven(ready(), "the plan of a file")
    state, actions = run(AUTO, given, on.Trained(A, is_of_plan=False))
    assert state.mode is Mode.MEASURING
    assert of(actions, do.Use) == do.Use(Target.CONFIGURED, Options.CONFIGURED, resets_window=True)


def test_layers_that_may_not_run_again() -> None:
    state, actions = run(AUTO, *CHECKED, on.Refused("of a hook"))
    assert (
        of(actions, do.MakePlan)
        and state.now.question == Question(is_withdrawn=True)
        and state.target is Target.PLAN
    )
    state, _ = run(AUTO, on.PlanGiven(ready(), "a file"), on.Trained(A), on.Refused("of a hook"))
    assert state.mode is Mode.MEASURING


def test_an_error_keeps_the_plan_and_ends_planning() -> None:
    state, actions = run(AUTO, *CHECKED, on.Failed("an error"))
    assert state.mode is Mode.FOLLOWING and state.now.ready == ready()
    assert "keeps its plan" in of(actions, do.Say).line
    state, _ = run(state, on.Forward(9, fits=False))
    assert state.mode is Mode.GAVE_UP


# ---- which parameters are trained ----------------------------------------------------------------


def trained(state: State, *keys: bytes) -> tuple[State, list[do.Action]]:
    """Tell of forwards in which these are trained."""
    actions: list[do.Action] = []
    before = state.key
    for key in keys:
        state, actions = run(state, on.Trained(key, has_changed=key != before))
        before = key
    return state, actions


def test_another_set_is_measured_and_the_plan_of_the_first_comes_back() -> None:
    state, _ = run(AUTO, *CHECKED)
    state, actions = trained(state, A, A, A, A, B)
    assert state.mode is Mode.MEASURING and state.key == B and state.target is Target.CONFIGURED
    state, actions = run(state, on.Profiled("p", is_recorded=True), on.Timed([1]), planned("of B"))
    assert not [each for each in actions if isinstance(each, do.Keep)]  # the first set's is kept
    state, actions = trained(state, B, B, B, B, A)
    assert state.mode is Mode.FOLLOWING and of(actions, do.Use).ready == ready()
    assert state.now.draft == "draft of plan"
    state, actions = trained(state, A, A, A, A, B)
    assert state.now.ready == ready("of B")


def test_what_takes_turns_is_ignored_until_it_lasts() -> None:
    state, _ = run(AUTO, *CHECKED)
    turns, _ = trained(state, *[A, B] * 20)
    assert turns.key == A and turns.mode is Mode.CHECKING
    lasting, _ = trained(state, A, B, B, B)
    assert lasting.key == A
    lasting, _ = trained(state, A, B, B, B, B)
    assert lasting.key == B and lasting.mode is Mode.MEASURING


def test_measuring_anew_has_an_end() -> None:
    state, _ = run(replace(AUTO, patience=1), *CHECKED)
    for number in range(2 * MOST_ROUNDS):
        state, _ = trained(state, (A, B, C)[number % 3])
    assert state.mode is Mode.GAVE_UP and "too often" in state.summary


def test_the_plan_of_the_set_before_is_kept_and_of_no_other() -> None:
    state, _ = run(replace(AUTO, patience=1), *CHECKED)
    state, _ = trained(state, A, B)
    state, _ = trained(state, A)
    assert state.mode is Mode.FOLLOWING and state.now.ready == ready()
    state, _ = trained(state, B, C)
    state, _ = trained(state, A)
    assert state.mode is Mode.MEASURING


# ---- what a plan came to -------------------------------------------------------------------------


def judged(state: State, **more: Any) -> tuple[State, list[do.Action]]:
    return run(state, on.Timed([2.0]), on.Judged(**more))


def corrected(**more: Any) -> on.Corrected:
    values = {"draft": "draft", "words": "compute is slow", "causes": frozenset({"compute"})}
    return on.Corrected(ready("corrected"), **{**values, "is_another": True, **more})  # type: ignore[arg-type]


def test_corrected_times_may_lead_to_another_plan() -> None:
    state, _ = run(AUTO, *CHECKED)
    another, _ = judged(state, corrected=corrected(is_speed=True))
    assert another.mode is Mode.CHECKING and another.now.ready == ready("corrected")
    assert another.now.times.before == [2.0] and another.now.times.fallback == ()
    assert another.now.causes == {"compute"}
    same, _ = judged(state, corrected=corrected(is_another=False))
    assert same.mode is Mode.FOLLOWING and "no other plan would be faster" in same.summary
    assert same.now.times.fallback == [3.0] and same.now.times.before == ()


def test_a_plan_that_loses_is_dropped() -> None:
    state, _ = run(AUTO, *CHECKED)
    lost = on.Lost(ready("fallback"), "draft", "offloading everything", 3.0, 2.0)
    state, actions = judged(state, lost=lost)
    assert state.mode is Mode.FOLLOWING and of(actions, do.Use).ready == ready("fallback")
    assert "drops its plan" in of(actions, do.Say).line
    assert of(actions, do.Tell).ready == of(actions, do.Keep).ready == ready("fallback")


# ---- out of memory, and wrong second runs --------------------------------------------------------


def test_tighter_plans_come_before_the_ladder() -> None:
    state, actions = run(AUTO, *CHECKED, on.OutOfMemory())
    assert of(actions, do.MakePlan) and state.now.question == Question(less_memory=True)
    tighter, actions = run(state, planned("tighter", cap_bytes=5.0))
    assert tighter.mode is Mode.CHECKING and tighter.now.cap_bytes == 5.0
    assert of(actions, do.Answer).words == "does tighter"
    rungs = []
    state, actions = run(tighter, on.OutOfMemory(), on.NotPlanned("none"))
    while [each for each in actions if isinstance(each, do.Answer)]:
        assert state.mode is Mode.TIGHTENED and state.now.ready is None
        rungs.append(of(actions, do.Use).target)
        state, actions = run(state, on.OutOfMemory())
    assert tuple(rungs) == LADDER
    state, actions = run(tighter, on.OutOfMemory(runs_again=True), on.NotPlanned("none"))
    assert of(actions, do.Use).target is Target.WAITING  # to recompute would hold more
    assert "the device ran out of memory" in state.summary


@pytest.mark.parametrize("name", ["", "auto", "pyao"])
def test_the_ladder_ends_every_other_decision(name: str) -> None:
    state = replace(AUTO, name=name)
    if name:
        state, _ = run(state, on.Starts())
    state, actions = run(state, on.OutOfMemory(runs_again=True))
    assert of(actions, do.Use).target is Target.WAITING  # layers run again already
    assert do.CancelMeasuring() in actions
    for event in (on.PlanGiven(ready(), "a rule"), on.Heard(ready()), planned()):
        assert run(state, event) == (state, [])


def test_the_rule_of_pyao_decides_once() -> None:
    state, actions = run(replace(AUTO, name="pyao"), on.Starts())
    decided, actions = run(state, on.PlanGiven(ready(), ""))
    assert decided.mode is Mode.FOLLOWING and decided.summary == ""
    assert of(actions, do.Use).target is Target.PLAN
    undecided, actions = run(state, on.GivesUp(""))
    assert undecided.mode is Mode.GAVE_UP and actions == [do.CancelMeasuring()]


def test_wrong_second_runs_are_ended_at_once() -> None:
    wrong = on.SecondRunWrong(may_replan=True, why="a layer differs")
    state, actions = run(AUTO, *CHECKED, wrong)
    assert state.mode is Mode.ONCE
    assert of(actions, do.Use) == do.Use(Target.EVERYTHING, Options.ONCE)
    state, actions = run(state, on.Forward(8))
    assert of(actions, do.MakePlan) and state.now.question == Question(is_withdrawn=True)
    assert state.target is Target.EVERYTHING
    state, _ = run(state, planned("once"))
    assert state.target is Target.PLAN
    for before in (AUTO, run(AUTO, *CHECKED)[0], run(AUTO, *MEASURED)[0]):
        state, actions = run(before, replace(wrong, may_replan=False))
        assert state.mode is Mode.TIGHTENED and of(actions, do.Use).options is Options.ONCE
        state, actions = run(state, on.OutOfMemory())
        assert of(actions, do.Use).target is Target.RECOMPUTED
    for before in (run(AUTO, on.Starts())[0], run(AUTO, *MEASURED)[0]):
        assert run(before, wrong) == (before, [])


# ---- random runs ---------------------------------------------------------------------------------


def an_event(random: random.Random) -> on.Event:
    """Return any event, also one that could not come now."""
    kind, number = random.choice(EVENTS), random.random()
    some = ready(f"plan {number}", keeps_all=random.random() < 0.2)
    coin = random.random() < 0.5
    draft = None if random.random() < 0.2 else number
    judgement = on.Corrected(some, draft, "words", frozenset({"copies"}), coin, is_speed=coin)
    lost = on.Lost(ready(f"lost {number}"), draft, "the plan before", 2.0, 1.0)
    made: dict[type[on.Event], Any] = {
        on.Unlimited: lambda: on.Unlimited("nothing to free", keeps_all=coin),
        on.PlanGiven: lambda: on.PlanGiven(some, "a file"),
        on.Trained: lambda: on.Trained(random.choice((A, B, C)), coin, random.random() < 0.8),
        on.Forward: lambda: on.Forward(8, fits=coin),
        on.Profiled: lambda: on.Profiled(number, random.random() < 0.8, random.random() < 0.8),
        on.Timed: lambda: on.Timed([number] if coin else []),
        on.Planned: lambda: on.Planned(
            some, draft, "how", random.choice((None, A, B)), source=random.choice(list(Source))
        ),
        on.NotPlanned: lambda: on.NotPlanned("no reason", coin),
        on.Judged: lambda: on.Judged(
            judgement if random.random() < 0.5 else None, lost if random.random() < 0.5 else None
        ),
        on.Heard: lambda: on.Heard(some if coin else None),
        on.Refused: lambda: on.Refused("of a hook"),
        on.SecondRunWrong: lambda: on.SecondRunWrong(coin, "a layer differs"),
        on.OutOfMemory: lambda: on.OutOfMemory(coin),
        on.GivesUp: lambda: on.GivesUp("nothing is known"),
        on.Failed: lambda: on.Failed("an error"),
    }
    return made.get(kind, kind)()


def check(before: State, event: on.Event, state: State, used: do.Use) -> None:
    """Check that one thing decides, and that it is the one that the engine was told to use."""
    now, mode = state.now, state.mode
    if mode is not before.mode:
        assert mode in TABLE[before.mode][type(event)].to
    if mode is Mode.DETACHED:
        return
    assert used.target is state.target
    if used.target is Target.PLAN:
        assert used.ready is now.ready
    assert (now.ready is not None) == (used.target is Target.PLAN)
    assert (state.rung is not None) == (mode is Mode.TIGHTENED)
    has_plan = {Mode.FOLLOWING: True, Mode.CHECKING: True, Mode.RECORDING: now.ready is not None}
    assert (now.ready is not None) == has_plan.get(mode, False)
    assert state.before is None or state.key != state.before[0]
    if before.mode is Mode.TIGHTENED:
        assert mode is Mode.TIGHTENED


def random_run(seed: int) -> set[Mode]:
    """Send events in any order; return the modes that were reached."""
    generator = random.Random(seed)
    name = generator.choice(("", "auto", "auto", "auto", "pyao"))
    state = State(name=name, patience=generator.choice((1, 2)), num_rounds_left=4, rungs=LADDER)
    used, modes = do.Use(Target.CONFIGURED), {state.mode}
    pending: list[on.Event] = [on.Starts()] if name and generator.random() < 0.9 else []
    for _ in range(40):
        event = pending.pop() if pending else an_event(generator)
        if isinstance(event, on.Detached) and generator.random() < 0.9:
            continue  # else most runs are over before they have begun
        before = state
        state, actions = next_state(before, event)
        for action in actions:
            used = action if isinstance(action, do.Use) else used
        check(before, event, state, used)
        modes.add(state.mode)
    return modes


def test_no_sequence_of_events_leaves_two_in_charge() -> None:
    assert set.union(*(random_run(seed) for seed in range(500))) == set(Mode)


@pytest.mark.thorough
def test_none_of_ten_thousand_sequences_does() -> None:
    assert set.union(*(random_run(seed) for seed in range(500, 10_500))) == set(Mode)
