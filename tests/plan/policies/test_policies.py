"""Policies that read a budget or a plan, and PyAO's: what leaves, and the same gradients."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from hf_pyao import PyAOConfig, attach
from hf_pyao.config import POLICY_NAMES
from hf_pyao.engine.runtime.policy import Offload, Policy, Situation
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.errors import ConfigError
from hf_pyao.model.map.model_identity import identity_of
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.measure.pack_intervals import PackIntervals
from hf_pyao.plan.paper.pyao_plan import plan_of_rule, saved_by
from hf_pyao.plan.policies.budget import OVER_BUDGET, OffloadBudget
from hf_pyao.plan.policies.by_name import POLICIES
from hf_pyao.plan.policies.plan_policy import PLANNED, PlanPolicy
from tests.auto.recording.test_model_copy import program_of
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.simulation.transport import SimulatedTransport


def step(model: torch.nn.Module, num_forwards: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    losses = [model(**tiny_batch(), use_cache=False).loss for _ in range(num_forwards)]
    torch.stack(losses).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_each_name_makes_a_policy() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)


# ---- budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
@pytest.mark.parametrize("num_tensors", [0, 1, 7, 10_000])
def test_the_first_k_tensors_leave_in_each_forward(architecture: str, num_tensors: int) -> None:
    model = tiny_model(architecture)
    expected = step(model, 2)
    config = replace(EVERY_LAYER, policy="budget", budget=num_tensors)
    with attach(model, config, transport=SimulatedTransport(1)) as offloader:
        assert_same(step(model, 2), expected)
        copies = offloader.transport.num_copies["offload"]  # type: ignore[attr-defined]
        metrics = offloader.metrics()
    with attach(model, EVERY_LAYER, transport=SimulatedTransport(1)) as offloader:
        step(model, 2)
        most = offloader.transport.num_copies["offload"]  # type: ignore[attr-defined]
    assert copies == min(2 * num_tensors, most)
    assert (f"kept_bytes/{OVER_BUDGET}" in metrics) == (copies < most)


def test_bytes_are_not_passed(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    expected = step(model)
    for budget in ("1KiB", "100KB", "1GiB"):
        config = replace(EVERY_LAYER, policy="budget", budget=budget)
        with attach(model, config) as offloader:
            assert_same(step(model), expected)
            moved = offloader.metrics()["offloaded_bytes"]
        assert moved <= {"1KiB": 1024, "100KB": 100_000, "1GiB": 2**30}[budget]
    assert moved > 100_000


def test_what_stays_in_any_case_takes_nothing_of_the_budget() -> None:
    policy = OffloadBudget(100, max_tensors=1).for_forward()
    slot = Slot("layer", 0, "mlp", 0, 1000, torch.float32)
    assert policy.decide(slot, Situation(stays="shared by layers")) == Offload()
    assert policy.decide(slot._replace(nbytes=10), Situation()) != Offload()
    assert policy.decide(slot, Situation()) == Offload()
    assert policy.decide(slot, Situation()) != Offload()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is depre:FutureWarning")
def test_a_budget_composes_with_last_layers_recomputing_and_checkpointing() -> None:
    model = tiny_model("llama")
    expected = step(model)
    config = PyAOConfig(
        policy="budget",
        budget=3,
        min_bytes=0,
        keep_last_layers=1,
        recompute_modules=("mlp.act_fn",),
        host_memory_gib=1,
    )
    with attach(model, config) as offloader:
        assert_same(step(model), expected)
        assert offloader.metrics()["recomputed_bytes"] > 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with attach(model, replace(EVERY_LAYER, policy="budget", budget=1)) as offloader:
        assert_same(step(model), expected)
        assert offloader.metrics()["offloaded_bytes"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "budget"}, "policy is 'budget', and budget is not given"),
        ({"budget": 3}, "budget is 3, which has no effect while policy is 'auto'"),
        ({"policy": "budget", "budget": -1}, "budget is -1; it cannot be negative"),
        ({"policy": "budget", "budget": "2 elephants"}, "expected a whole number of tensors"),
        ({"policy": "budget", "budget": 2.5}, "budget is 2.5; expected a whole number of tensors"),
        ({"policy": "budget", "budget": True}, "expected a whole number of tensors"),
        ({"policy": "plan"}, "policy is 'plan', and plan is not given"),
        ({"policy": "all", "plan": "plan.json"}, "plan is 'plan.json', which has no effect"),
        ({"policy": "pyao", "profile_steps": -1}, "profile_steps is -1"),
        ({"policy": "pyao", "profile_steps": 0}, "profile_steps is 0; expected 1 or more"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PyAOConfig(**settings)


def test_what_is_recomputed_takes_nothing_of_the_budget() -> None:
    model = tiny_model("llama")
    expected = step(model)
    config = replace(EVERY_LAYER, recompute_modules=("pointwise",))
    with attach(model, config, transport=SimulatedTransport(1)) as offloader:
        step(model)
        most = offloader.transport.num_copies["offload"]  # type: ignore[attr-defined]
    for budget in (1, 4, most, most + 1):
        budgeted = replace(config, policy="budget", budget=budget)
        with attach(model, budgeted, transport=SimulatedTransport(1)) as offloader:
            assert_same(step(model), expected)
            copies = offloader.transport.num_copies["offload"]  # type: ignore[attr-defined]
        # What is stored to rebuild others is offloaded whatever the budget is.
        assert budget <= copies <= most or copies == most


# ---- plans -------------------------------------------------------------------------------------


def slots_of(model: torch.nn.Module) -> list[str]:
    names: list[str] = []

    class Listing(Policy):
        name = "listing"

        def decide(self, slot: Slot, situation: Situation) -> Offload:
            if situation.stays is None and slot.name not in names:
                names.append(slot.name)
            return Offload()

    with attach(model, replace(EVERY_LAYER, policy=Listing())):
        step(model)
    return names


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
def test_a_plan_is_followed_slot_by_slot(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    expected = step(model)
    names = slots_of(model)
    plan = Plan(
        model=identity_of(find_layers(model)),
        slots=[
            PlannedSlot(name=names[0], action="keep", reason="small"),
            PlannedSlot(name=names[1], action="offload", layers=[0]),
            PlannedSlot(name=names[-1], action="recompute", otherwise="keep"),
        ],
        otherwise="keep",
    )
    path = tmp_path / "plan.json"
    plan.to_json_file(path)
    assert Plan.from_json_file(path) == plan
    config = replace(EVERY_LAYER, policy="plan", plan=path)
    with attach(model, config, transport=SimulatedTransport(1)) as offloader:
        assert_same(step(model), expected)
        assert offloader.transport.num_copies["offload"] == 1  # type: ignore[attr-defined]
        assert offloader.metrics()[f"kept_bytes/{PLANNED}"] > 0
        assert "policy 'plan'" in offloader.describe()


def test_layers_of_which_a_plan_recomputes_nothing_are_not_traced(tmp_path: Path) -> None:
    """To trace a layer takes the host longer than to run it."""
    model = tiny_model("llama", num_hidden_layers=4)
    expected = step(model)
    name = "mlp.down_proj:0"  # the product of two that are kept
    num_modes: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: num_modes.append(_len_torch_dispatch_stack()))
    for layers, expected_modes in (([1, 2], [0, 1, 1, 0]), (None, [1, 1, 1, 1])):
        slot = PlannedSlot(name=name, action="recompute", otherwise="keep", layers=layers)
        plan = Plan(model=identity_of(find_layers(model)), slots=[slot], otherwise="keep")
        plan.to_json_file(tmp_path / "plan.json")
        config = replace(EVERY_LAYER, policy="plan", plan=tmp_path / "plan.json")
        with attach(model, config) as offloader:
            num_modes.clear()
            assert_same(step(model), expected)
            assert offloader.metrics()["recomputed_bytes"] > 0
        assert num_modes == expected_modes


def test_codecs_of_a_plan_are_used() -> None:
    model = tiny_model("llama")
    names = slots_of(model)
    plan = Plan(slots=[PlannedSlot(name=name, action="offload", codec="int8") for name in names])
    with attach(model, replace(EVERY_LAYER, policy=PlanPolicy(plan))) as offloader:
        step(model)
        metrics = offloader.metrics()
    assert metrics["link_bytes"] < 2 * metrics["offloaded_bytes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": [PlannedSlot(name="mlp:0", action="drop")]}, "unknown action 'drop'"),
        ({"slots": [PlannedSlot(name="mlp", action="keep")]}, "expected a sub-module and a number"),
        ({"slots": [PlannedSlot(name="mlp:x", action="keep")]}, "expected a sub-module and a num"),
        ({"slots": [PlannedSlot(name="a:0", action="keep", codec="int9")]}, "codec is 'int9'"),
        ({"slots": [PlannedSlot(name="a:0", action="keep")] * 2}, "'a:0' is named twice"),
        ({"slots": [], "otherwise": "recompute"}, "otherwise is 'recompute'"),
        (
            {
                "slots": [
                    PlannedSlot(name="a:0", action="recompute", rebuilt_from=["b:0"]),
                    PlannedSlot(name="b:0", action="recompute", rebuilt_from=["a:0"]),
                ]
            },
            "slots are recomputed from each other",
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**changes)


def test_circles_are_looked_for_in_each_layer() -> None:
    def recomputed(name: str, layers: list[int], *rebuilt_from: str) -> PlannedSlot:
        return PlannedSlot(
            name=name, action="recompute", layers=layers, rebuilt_from=list(rebuilt_from)
        )

    Plan(slots=[recomputed("a:0", [0], "b:0"), recomputed("b:0", [1], "a:0")])
    with pytest.raises(PlanError, match="recomputed from each other"):
        Plan(
            slots=[
                recomputed("a:0", [0], "b:0"),
                recomputed("b:0", [0], "a:0"),
                recomputed("a:0", [1]),
            ]
        )


def test_plans_of_other_models_and_shapes_are_refused(tmp_path: Path) -> None:
    llama, opt = tiny_model("llama"), tiny_model("opt")

    def attach_with(plan: Plan, model: torch.nn.Module) -> None:
        path = tmp_path / "plan.json"
        plan.to_json_file(path)
        with attach(model, replace(EVERY_LAYER, policy="plan", plan=str(path))):
            step(model)

    of_llama = Plan(model=identity_of(find_layers(llama)), slots=[])
    attach_with(of_llama, llama)
    with pytest.raises(PlanError, match="made for another model: its layer_classes is"):
        attach_with(of_llama, opt)
    named = Plan(slots=[PlannedSlot(name="mlp.act_fm:0", action="keep")])
    with pytest.raises(PlanError, match=r"'mlp.act_fm'.*did you mean 'mlp.act_fn'"):
        attach_with(named, llama)
    with pytest.raises(PlanError, match="names layer 99 for slot"):
        attach_with(Plan(slots=[PlannedSlot(name=":0", action="keep", layers=[99])]), llama)
    small = Plan(slots=[PlannedSlot(name=slots_of(llama)[0], action="keep", nbytes=8)])
    with pytest.raises(PlanError, match="the plan was made for 8"):
        attach_with(small, llama)
    step(llama)  # the model is as it was


# ---- PyAO's rule -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
def test_pyao_times_decides_once_and_goes_on(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(architecture)
    expected = step(model)
    path = tmp_path / "plan.json"
    config = replace(EVERY_LAYER, policy="pyao", profile_steps=2, plan=str(path))
    with caplog.at_level(logging.INFO, logger="hf_pyao"), attach(model, config) as offloader:
        for number in range(4):
            assert (offloader.pyao_rule is not None) and (
                (offloader.pyao_rule.plan is None) == (number < 2)
            )
            assert_same(step(model), expected)
        plan = offloader.pyao_rule.plan
        assert offloader.engine.observer is None
        assert offloader.engine.policy.name == "pyao"
    assert plan is not None
    assert "policy 'pyao' recomputes" in caplog.text
    assert plan.figures["num_micro_batches"] == 2
    assert Plan.from_json_file(path) == plan
    with attach(model, config) as offloader:  # a later run follows it from the start
        assert offloader.pyao_rule is None
        assert_same(step(model), expected)
        assert offloader.engine.observer is None


def test_an_observer_of_the_users_does_not_stop_it() -> None:
    model = tiny_model("llama")
    with attach(model, replace(EVERY_LAYER, policy="pyao", profile_steps=1)) as offloader:
        assert "policy 'pyao'" in offloader.describe()
        offloader.engine.observe(None)
        step(model)
        assert offloader.pyao_rule is not None
        assert offloader.pyao_rule.plan is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
@pytest.mark.thorough
def test_compiled_layers_cannot_be_timed_and_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    path = tmp_path / "plan.json"
    config = replace(EVERY_LAYER, policy="pyao", profile_steps=1, plan=path)
    with attach(model, config) as offloader:
        step(model)
        assert offloader.pyao_rule is not None
        assert offloader.pyao_rule.plan is None
    assert not path.exists()
    assert "compiled layers cannot be timed" in caplog.text


def test_what_is_flagged_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_pyao.auto import pyao_rule
    from hf_pyao.plan.paper.iqr import Outliers

    def flag(rates: dict[str, float], link_gib_per_s: float) -> Outliers:
        assert "mlp.act_fn" in rates and all(rate > 0 for rate in rates.values())
        return Outliers(
            flagged=("mlp.act_fn", "mlp"),
            upper_bound_gib_per_s=1.0,
            link_gib_per_s=link_gib_per_s,
            throughput_gib_per_s=rates,
        )

    monkeypatch.setattr(pyao_rule, "find_outliers", flag)
    model = tiny_model("llama")
    expected = step(model)
    with attach(model, replace(EVERY_LAYER, policy="pyao", profile_steps=1)) as offloader:
        assert_same(step(model), expected)
        before = offloader.metrics()
        assert_same(step(model), expected)
        after = offloader.metrics()
    assert before["recomputed_bytes"] == 0 < after["recomputed_bytes"]
    assert after["offloaded_bytes"] < before["offloaded_bytes"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("architecture", "flagged", "slots"),
    [
        ("opt", "fc2", {"activation_fn:0"}),
        ("gpt2", "mlp.c_proj", {"mlp.c_proj:0"}),
        ("llama", "mlp.down_proj", {"mlp.down_proj:0"}),
        ("llama", "mlp", {"mlp:0", "mlp:1"}),
    ],
)
def test_what_a_flagged_part_saves_is_recomputed_whoever_saved_it_before(
    architecture: str, flagged: str, slots: set[str]
) -> None:
    """OPT's ``fc2`` saves the result of its activation, which that has saved; and so on."""
    model = tiny_model(architecture)
    expected = step(model)
    with attach(model, EVERY_LAYER) as offloader:
        found: list[PackIntervals] = []
        transport, device = offloader.transport, offloader.device
        offloader.engine.observe(PackIntervals(transport, device, 1, found.append))
        step(model)
    saved = found[0].saved()
    plan = plan_of_rule([flagged], saved, found[0].throughput_gib_per_s())
    assert {slot.name for slot in plan.slots} == slots
    recorded = program_of(model)
    assert {path: set(names) for path, names in saved_by(recorded).items()} == {
        path: set(names) for path, names in saved.items()
    }
    with attach(model, replace(EVERY_LAYER, policy=PlanPolicy(plan))) as offloader:
        assert_same(step(model), expected)
        figures = offloader.metrics()
    sizes = {slot.name: slot.nbytes for slot in recorded.slots if slot.layer == 0}
    assert figures["recomputed_bytes"] == 3 * sum(sizes[name] for name in slots)


def test_a_plan_that_cannot_be_kept_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    (tmp_path / "folder.json").mkdir()
    blocked = tmp_path / "folder.json" / "x"
    blocked.mkdir()
    config = replace(EVERY_LAYER, policy="pyao", profile_steps=1, plan=str(tmp_path / "file"))
    (tmp_path / "file").mkdir()
    with pytest.raises(ReportError):  # a folder is no plan
        attach(model, config)
    config = replace(config, plan=str(tmp_path / "a" / "plan.json"))
    (tmp_path / "a").write_text("a file where a folder should be")
    with attach(model, config):
        step(model)
        step(model)
    assert "the plan is not kept" in caplog.text


def test_plan_and_report_are_written_where_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the script goes to another folder while it runs."""
    model = tiny_model("opt")
    monkeypatch.chdir(tmp_path)
    config = replace(
        EVERY_LAYER, policy="pyao", profile_steps=1, plan="plan.json", report="run.json"
    )
    (tmp_path / "elsewhere").mkdir()
    with attach(model, config):
        monkeypatch.chdir(tmp_path / "elsewhere")
        step(model)
    assert (tmp_path / "plan.json").exists()
    assert (tmp_path / "run.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
