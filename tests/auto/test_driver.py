"""The driver performs what the machine decides, once, also where an interrupt comes in between."""

from __future__ import annotations

import ast
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_pyao
from hf_pyao import attach
from hf_pyao.auto import deciding
from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.driver import Driver, Policies
from hf_pyao.auto.machine.states import Mode, Ready, State, Target
from hf_pyao.auto.plans.plan_timing import PlanCheck
from hf_pyao.auto.recording.forward_watch import ForwardWatch, Place
from hf_pyao.auto.recording.seen_forward import SeenForward
from hf_pyao.engine.runtime.policy import KeepEverything, OffloadAll
from hf_pyao.levers import Levers
from hf_pyao.plan.measure.profile import StepProfiler
from tests.auto.test_auto_policy import AUTO, NUM_MEASURED, step, transport
from tests.helpers import tiny_model

ROOT = Path(hf_pyao.__file__).parent


class Engine:
    """Notes what it is told to use; raises what is put in."""

    def __init__(self) -> None:
        self.used: list[object] = []
        self.windows: list[int] = []
        self.num_forwards = 3
        self.error: BaseException | None = None
        self.link = self

    def use(self, policy: object) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.used.append(policy)

    def set_window(self, window_bytes: int) -> None:
        self.windows.append(window_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        assert limit_bytes == 0
        self.used.append("waits")


class Switch:
    def __init__(self) -> None:
        self.configured = self.levers = Levers(head_loss="chunked", checkpoint_every=4)

    def set(self, levers: Levers) -> None:
        self.levers = levers


class Performer:
    """Plans what it is given."""

    def __init__(self, *answers: on.Event) -> None:
        self.answers = list(answers)
        self.performed: list[do.Action] = []

    def perform(self, action: do.Action, state: State) -> on.Event | None:
        self.performed.append(action)
        return self.answers.pop(0) if isinstance(action, do.MakePlan) else None


READY = Ready("a plan", "does a plan", options=Levers(checkpoint_every=2), num_elements=8)
EVERYTHING = OffloadAll(0)


def driver_of(engine: Engine, performer: Performer) -> tuple[Driver, Switch]:
    policies = Policies(
        configured=OffloadAll(1),
        nothing=KeepEverything("auto"),
        everything=EVERYTHING,
        recomputed=OffloadAll(2),
        of_plan=lambda ready: ready.plan,
        window_of_plan=lambda ready: 64,
        configured_window_bytes=128,
    )
    rungs = (Target.EVERYTHING, Target.WAITING)
    switch = Switch()
    state = State(name="auto", num_rounds_left=4, rungs=rungs)
    driver = Driver(engine, policies, switch, state)  # type: ignore[arg-type]
    driver.perform_with(performer.perform)
    driver.send(on.Starts())
    driver.send(on.Trained(b"\1"))
    return driver, switch


def test_answers_of_the_performer_are_the_next_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="hf_pyao.auto.machine.driver")
    engine, performer = Engine(), Performer(on.Planned(READY, "draft", "it fits"))
    driver, switch = driver_of(engine, performer)
    driver.send(on.Profiled("profile", is_recorded=True))
    driver.send(on.Timed([1.0]))
    assert driver.state.mode is Mode.CHECKING
    assert engine.used == ["a plan"] and engine.windows == [64]
    assert switch.levers == READY.options
    modes = [(each["from"], each["to"]) for each in driver.transitions()]
    assert modes == [
        ("OFF", "MEASURING"),
        ("MEASURING", "TIMING"),
        ("TIMING", "RECORDING"),
        ("RECORDING", "CHECKING"),
    ]
    assert driver.transitions()[-1]["forward"] == 3
    assert "Planned: RECORDING -> CHECKING" in caplog.text


def test_memory_is_answered_with_what_is_done() -> None:
    engine, performer = Engine(), Performer()
    driver, switch = driver_of(engine, performer)
    assert "is offloaded" in str(driver.send(on.OutOfMemory()))
    assert "waits for every copy" in str(driver.send(on.OutOfMemory()))
    assert driver.send(on.OutOfMemory()) is None
    assert engine.used == [EVERYTHING, EVERYTHING, "waits"]
    driver.send(on.SecondRunWrong(may_replan=False, why="a layer differs"))
    assert switch.levers == Levers(head_loss="chunked")


def test_an_interrupt_only_delays_the_exchange() -> None:
    engine, performer = Engine(), Performer(on.Planned(READY, "draft", "it fits"))
    driver, _ = driver_of(engine, performer)
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        driver.send(on.PlanGiven(READY, "a file"))
    assert driver.state.target is Target.PLAN and not engine.used
    driver.send(on.Forward(8))
    assert engine.used == ["a plan"]
    driver.send(on.Forward(8))
    assert engine.used == ["a plan"]


def test_an_error_is_not_met_again() -> None:
    engine, performer = Engine(), Performer()
    driver, _ = driver_of(engine, performer)
    engine.error = ValueError("no policy")
    with pytest.raises(ValueError, match="no policy"):
        driver.send(on.PlanGiven(READY, "a file"))
    driver.send(on.Forward(8))
    assert not engine.used
    driver.send(on.OutOfMemory())
    assert engine.used == [EVERYTHING]


def test_nothing_else_exchanges_the_policy_or_the_window() -> None:
    callers = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func.value).rpartition(".")[2]
                on_engine = of in ("engine", "_engine") and node.func.attr == "use"
                on_link = of == "link" and node.func.attr in ("set_window", "set_limit")
                if on_engine or on_link:
                    callers.add(path.relative_to(ROOT).as_posix())
    assert callers == {"auto/machine/driver.py"}


# ---- in a run ------------------------------------------------------------------------------------


def test_listeners_hear_of_a_forward_in_their_order() -> None:
    model, owner, told = nn.Linear(2, 2), object(), []

    def telling(name: str) -> Any:
        def before(seen: SeenForward, *, is_first: bool) -> None:
            told.append((name, is_first))

        return before

    watches = [
        ForwardWatch(model, owner, telling("decides"), Place.DECIDES),
        ForwardWatch(model, owner, telling("measures"), Place.MEASURES),
        ForwardWatch(model, owner, telling("measures, newer"), Place.MEASURES),
        ForwardWatch(model, owner, telling("fits"), Place.FITS),
    ]
    assert len(model._forward_pre_hooks) == 1
    model(torch.ones(1, 2))
    first = ("measures, newer", "measures", "decides", "fits")
    assert told == [(name, True) for name in first]
    told.clear()
    watches[1].remove()
    watches[0].forget()
    model(torch.ones(1, 2))
    assert told == [("measures, newer", False), ("decides", True), ("fits", False)]
    for watch in watches:
        watch.remove()
    assert not model._forward_pre_hooks


def test_what_a_plan_is_compared_with_is_timed_without_the_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observed: list[set[type]] = []
    timed = PlanCheck.on_micro_batch

    def noting(check: PlanCheck, stats: Any) -> None:
        observed.append({type(each) for each in offloader.engine._lasting_observers})
        timed(check, stats)

    monkeypatch.setattr(PlanCheck, "on_micro_batch", noting)
    model = tiny_model("gpt2").train()
    config = replace(AUTO, device_memory_gib=1.0)  # everything fits: that is planned quickly
    with attach(model, config, transport=transport()) as offloader:
        profilers = 0
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
            profilers += any(
                isinstance(each, StepProfiler) for each in offloader.engine._lasting_observers
            )
        auto = offloader.auto
        assert auto is not None and auto.driver.state.now.times.fallback
        found = [each["to"] for each in auto.report()["transitions"]]
        assert found[:4] == ["MEASURING", "TIMING", "RECORDING", "FOLLOWING"]
    assert observed and all(each == {PlanCheck} for each in observed)
    assert profilers <= NUM_MEASURED - 1


def test_cached_memory_is_released_once_before_the_first_forward_of_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was cut up while everything was offloaded may not fit what a plan keeps."""
    plans_at_release: list[object] = []
    monkeypatch.setattr(
        deciding, "release_cached", lambda device: plans_at_release.append(offloader.plan)
    )
    model = tiny_model("gpt2").train()
    with attach(model, replace(AUTO, device_memory_gib=1.0), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 3):
            step(model, None, offloader)
            assert len(plans_at_release) == (offloader.plan is not None)
