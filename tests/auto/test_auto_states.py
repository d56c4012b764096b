"""Policy auto where two things change at once: what it knows must not contradict itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto import deciding
from hf_pyao.auto import policy as auto_policy
from hf_pyao.auto.machine.states import Mode
from hf_pyao.auto.plans.planning import PlanMaker
from hf_pyao.auto.plans.trained import TrainedParameters
from hf_pyao.auto.ranks import agreement
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.schema import read_json
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.ranks import ProcessRank
from tests.auto.test_auto_levers import config_of, levers_of, lifecycle_of
from tests.auto.test_auto_levers import wanted as wanted  # a fixture
from tests.auto.test_auto_phases import TIGHT, attached, freeze, llama, run
from tests.auto.test_auto_policy import NUM_MEASURED, assert_same, batch_of, step, transport
from tests.helpers import enable_checkpointing, tiny_model


def kept_at(path: Path, num_frozen: int) -> PyAOConfig:
    """Return a configuration whose plan is kept, and was made with so many layers frozen."""
    config = replace(TIGHT, plan=str(path))
    model = llama(num_frozen)
    with attached(model, config) as offloader:
        run(model, offloader, NUM_MEASURED + 1)
    assert path.exists()
    return config


def bare_like(model: nn.Module) -> nn.Module:
    bare = tiny_model("llama").train()
    bare.load_state_dict(model.state_dict())
    return bare


# ---- which plan is whose ---------------------------------------------------------------------------


def test_what_is_given_holds_where_everything_is_offloaded_again() -> None:
    model = llama(num_frozen=0)
    with attached(model, replace(TIGHT, keep_last_layers=1)) as offloader:
        before = offloader.engine.policy
        run(model, offloader, NUM_MEASURED + 1)
        assert offloader.plan is not None and offloader.auto is not None
        assert offloader.engine.policy is not before
        freeze(model, 1)
        run(model, offloader, 2 * NUM_MEASURED)  # a change counts once it has lasted
        assert offloader.engine.policy is before  # which keeps the last layer


@pytest.mark.thorough
def test_a_plan_for_others_does_not_come_back_as_the_plan_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "MOST_ROUNDS", 0)  # so that no plan of their own comes in between
    kept_at(tmp_path / "plan.json", num_frozen=1)
    model = llama(num_frozen=0)
    with attached(model) as offloader:
        assert offloader.auto is not None
        offloader.auto.resume(tmp_path / "plan.json")
        for num_frozen in (0, 2, 0):
            freeze(model, num_frozen)
            run(model, offloader, 2 * NUM_MEASURED)
            assert offloader.plan is None


@pytest.mark.thorough
def test_a_plan_is_for_the_parameters_with_which_its_step_was_recorded() -> None:
    """It is recorded before the next forward, as the model is then."""
    model = llama(num_frozen=1)
    with attached(model) as offloader:
        run(model, offloader, NUM_MEASURED)
        freeze(model, 0)
        run(model, offloader)
        assert offloader.plan is not None
        assert offloader.plan.facts.trained == TrainedParameters(model).mark


@pytest.mark.thorough
def test_a_plan_that_is_refused_or_not_found_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in what is known of the parameters, nor in what other ranks wait for."""
    model = llama(num_frozen=0)
    with attached(model) as offloader:  # its plan fits, so larger batches need another
        run(model, offloader, NUM_MEASURED + 1)
        plan, auto = offloader.plan, offloader.auto
        assert plan is not None and auto is not None
        with pytest.raises(PlanError):
            auto.follow(replace(plan, levers={"mlp_tiles": 4}), "a plan that may not be followed")
        assert offloader.plan is plan
        begun: list[str] = []
        asked = SimpleNamespace(
            propose=lambda text, number: begun.append(text), decide=lambda number: None
        )
        monkeypatch.setattr(auto._agreement, "_proposer", asked)
        monkeypatch.setattr(PlanMaker, "larger", lambda *_, **__: 1 / 0)
        run_larger = step(model, batch_of(16), offloader)
        assert not begun, "the other ranks would wait for it"
        assert offloader.plan is None
        assert auto.draft is None
        assert auto.driver.state.mode is Mode.GAVE_UP
        assert "offloads everything" in auto.summary
        assert_same(run_larger, step(bare_like(model), batch_of(16)))


def test_another_process_says_that_the_first_one_has_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (auto_policy, agreement):
        monkeypatch.setattr(module, "process_rank", lambda: ProcessRank(1, 2))
    monkeypatch.setattr(
        agreement, "RankExchange", lambda name: SimpleNamespace(number=1, num_ranks=2)
    )
    silent = SimpleNamespace(
        hear=lambda number: "" if number == NUM_MEASURED else None,
        decided=lambda number: None,
        leave=lambda: None,
    )
    monkeypatch.setattr(agreement, "Listener", lambda name: silent)
    model = llama(num_frozen=0)
    with attached(model) as offloader:
        auto = offloader.auto
        assert auto is not None
        for _ in range(NUM_MEASURED):
            found = step(model, None, offloader)
        assert offloader.plan is None
        assert auto.driver.state.mode is Mode.GAVE_UP
        assert "goes on offloading everything: the first process has no plan" in auto.summary
        assert_same(found, step(bare_like(model)))


# ---- levers ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_is_said_and_measured_is_of_the_levers_that_run(
    tmp_path: Path, wanted: dict[str, Any]
) -> None:
    """A profile beside a plan with segments; and where these give way to checkpointing."""
    wanted.update(checkpoint_every=1)
    model = tiny_model("llama").train()
    with attach(model, config_of(device_memory_gib=1e-5), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        assert levers_of(offloader).checkpoint_every == 1
        offloader.start_profile(tmp_path / "profile.json", 1)
        for _ in range(2):
            step(model, None, offloader)
        enable_checkpointing(model, use_reentrant=False)
        step(model, None, offloader)
        assert lifecycle_of(offloader).length == 0
        assert levers_of(offloader) == Levers()
        assert "computed again" not in offloader.describe()
    profile = Profile.from_dict(read_json(tmp_path / "profile.json"))
    assert profile.settings["checkpoint_every"] == 1
    assert profile.program is not None
    program = RecordedStep.from_dict(profile.program).whole()
    assert {slot.name for slot in profile.slots} == {slot.name for slot in program.slots}
