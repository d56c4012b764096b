"""Policy auto: it measures, plans within the device's memory, follows the plan, and looks again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_pyao import PyAOConfig, PyAOPlugin, PyAOTrainer, PyAOTrainingArguments, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.plans.plan_timing import PlanCheck, TimedMicroBatch
from hf_pyao.auto.plans.planning import AFTER_RUNNING_OUT
from hf_pyao.auto.policy import PLAN_FILE
from hf_pyao.config import GIB
from hf_pyao.engine.recompute.verification import NUM_FIRST_FORWARDS
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport

LINK = LinkModel(d2h_gib_per_s=0.3, h2d_gib_per_s=0.3)
NUM_MEASURED = 2
AUTO = PyAOConfig(policy="auto", profile_steps=NUM_MEASURED, min_bytes=256, window=8192)


SPEEDS = DeviceModel(tflop_per_s=0.01, memory_gib_per_s=5.0, launch_us=2.0)


def batch_of(times: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.cat([value] * times) for name, value in tiny_batch().items()}


def step(
    model: nn.Module,
    batch: dict[str, torch.Tensor] | None = None,
    offloader: Offloader | None = None,
    speeds: DeviceModel = SPEEDS,
) -> list[torch.Tensor]:
    """Run a micro-batch with the same random numbers each time; return loss and gradients.

    On the clock of *offloader*'s link, if it is given, at these *speeds*.
    """
    torch.manual_seed(0)
    model.zero_grad()
    clock: Any = nullcontext()
    if offloader is not None:
        clock = SimulatedDevice(speeds, offloader.transport.link, offloader.host_pool)
    with clock:
        loss = model(**(batch or batch_of()), use_cache=False).loss
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def run_out(offloader: Offloader) -> str | None:
    """Tell *offloader* that a micro-batch did not fit; return what is done from now on."""
    return offloader.micro_batches.tightening.tighter(torch.OutOfMemoryError("out"))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what hf_pyao warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("hf_pyao")
    ]


def figures_of(
    architecture: str, config: PyAOConfig = AUTO, batch: dict[str, torch.Tensor] | None = None
) -> dict[str, float]:
    """Return what a plan without a limit says of all plans that need no solver."""
    model = tiny_model(architecture).train()
    with attach(model, replace(config, device_memory_gib=1.0), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + NUM_FIRST_FORWARDS + 1):
            step(model, batch, offloader)
        assert offloader.plan is not None
        return offloader.plan.numbers()


def transport() -> SimulatedTransport:
    return SimulatedTransport(0, link=LINK)


def capped(
    architecture: str,
    share: float,
    config: PyAOConfig = AUTO,
    batch: dict[str, torch.Tensor] | None = None,
) -> PyAOConfig:
    """Return a configuration whose cap lies between the lowest peak and that of keeping all."""
    figures = figures_of(architecture, config, batch)
    peaks = [value for name, value in figures.items() if name.startswith("peak_bytes/")]
    most = figures["kept_peak_bytes"]
    least = min(*peaks, most)
    return replace(config, device_memory_gib=(least + share * (most - least)) / GIB)


@contextmanager
def attached(model: nn.Module, config: PyAOConfig) -> Iterator[Offloader]:
    with attach(model, config, transport=transport()) as offloader:
        yield offloader


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
@pytest.mark.sampled(every=1000)
def test_gradients_stay_right_before_at_and_after_the_switch(architecture: str) -> None:
    model = tiny_model(architecture).train()
    expected = step(model)
    config = capped(architecture, 0.5)
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED):
            assert_same(step(model, None, offloader), expected)
            assert offloader.plan is None
        for _ in range(3):
            assert_same(step(model, None, offloader), expected)
        plan = offloader.plan
        assert plan is not None
        assert plan.facts.peak_bytes <= config.device_memory_gib * GIB
        assert {slot.action for slot in plan.slots} != {"keep"}
        moved = offloader.metrics()
        assert moved["offloaded_bytes"] + moved["recomputed_bytes"] > 0
    assert_same(step(model), expected)


@pytest.mark.thorough
def test_of_layers_that_run_again_their_inputs_alone_are_planned() -> None:
    """With tiles and a chunked loss too; the gradients are those without any offloading."""
    levers = {"checkpoint_every": 1, "mlp_tiles": 2, "head_loss": "chunked"}
    batch = batch_of(64)
    model = tiny_model("llama").train()
    with attach(model, PyAOConfig(policy="off", mlp_tiles=2, head_loss="chunked")):
        expected = step(model, batch)
    config = capped("llama", 0.5, replace(AUTO, **levers), batch)
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + NUM_FIRST_FORWARDS + 2):
            assert_same(step(model, batch, offloader), expected)
        plan = offloader.plan
        assert plan is not None
        assert plan.facts.peak_bytes <= config.device_memory_gib * GIB
        assert {slot.name for slot in plan.slots} == {":0"}
        assert {slot.action for slot in plan.slots} == {"keep", "offload"}
        assert not {name for name in plan.numbers() if "checkpointing" in name}
        moved = offloader.metrics()
        assert moved["offloaded_bytes"] > 0 and moved["recomputed_bytes"] > 0


def test_where_everything_fits_no_hook_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = tiny_model("gpt2").train()
    expected = step(model)
    with attached(model, replace(AUTO, device_memory_gib=1.0)) as offloader:
        for _ in range(NUM_MEASURED):
            step(model, None, offloader)
        num_packs = offloader.engine.num_packs
        assert num_packs > 0
        for _ in range(3):
            assert_same(step(model, None, offloader), expected)
            offloader.warn_if_idle()
        assert offloader.engine.num_packs == num_packs
    lines = [record.getMessage() for record in caplog.records]
    assert sum("offloads nothing, since everything fits" in line for line in lines) == 1
    assert not warnings_in(caplog)


def test_on_a_cpu_without_a_cap_nothing_is_done_and_it_says_so() -> None:
    model = tiny_model("opt").train()
    expected = step(model)
    with attach(model, PyAOConfig()) as offloader:
        assert_same(step(model), expected)
        assert offloader.engine.num_packs == 0
        assert "on a CPU there is no device memory to free" in offloader.describe()
        assert "device_memory_gib" in offloader.describe()
        assert offloader.profile_writer is None


@pytest.mark.thorough
def test_a_cap_below_the_least_peak_is_named_with_what_would_help(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama").train()
    expected = step(model)
    with attached(model, replace(AUTO, device_memory_gib=1e-6)) as offloader:
        for _ in range(NUM_MEASURED + 2):
            assert_same(step(model, None, offloader), expected)
        assert offloader.plan is not None
    (warning,) = warnings_in(caplog)
    assert "no plan fits 0.00102 MiB" in warning
    assert "head_loss='chunked'" in warning
    assert "everything fits" not in offloader.describe()


@pytest.mark.thorough
def test_a_larger_batch_is_planned_for_anew() -> None:
    model = tiny_model("gpt2").train()
    small, large = batch_of(8), batch_of(32)
    expected = step(model, large)
    config = capped("gpt2", 0.7)
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + 2):
            step(model, small, offloader)
        first = offloader.plan
        assert first is not None
        assert_same(step(model, large, offloader), expected)
        second = offloader.plan
        assert second is not None
        assert second is not first
        assert second.facts.num_elements == 4 * first.facts.num_elements
        assert second.facts.peak_bytes > first.facts.peak_bytes
        step(model, small, offloader)
        assert offloader.plan is second  # it holds for smaller ones


@pytest.mark.thorough
def test_the_plan_is_kept_and_followed_without_measuring(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = tiny_model("opt").train()
    expected = step(model)
    config = replace(capped("opt", 0.4), plan=str(path))
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        made = offloader.plan
    assert made is not None
    assert Plan.from_json_file(path) == made
    with attached(model, config) as offloader:
        assert offloader.plan == made
        assert offloader.profile_writer is None
        assert_same(step(model, None, offloader), expected)


@pytest.mark.thorough
def test_a_kept_plan_for_smaller_batches_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    model = tiny_model("gpt2").train()
    config = replace(capped("gpt2", 0.5), plan=str(path))
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
    large = batch_of(32)
    expected = step(model, large)
    with attached(model, config) as offloader:
        assert_same(step(model, large, offloader), expected)
        assert offloader.plan is None
        assert offloader.metrics()["offloaded_bytes"] > 0
    assert sum("Delete the plan" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.thorough
def test_what_is_given_binds_the_plan() -> None:
    config = replace(capped("llama", 0.3), keep_last_layers=2, window="layer")
    model = tiny_model("llama").train()
    expected = step(model)
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + 2):
            assert_same(step(model, None, offloader), expected)
        plan = offloader.plan
        assert plan is not None
        assert plan.figures["keep_last_layers"] == 2
        assert plan.facts.window_bytes is None
        last = {3 - 1, 3 - 2}
        for slot in plan.slots:
            if slot.action != "keep":
                assert not last & set(slot.layers or range(3))


@pytest.mark.thorough
def test_modules_to_recompute_are_recomputed() -> None:
    config = replace(capped("gpt2", 0.5), recompute_modules=("mlp_act",))
    model = tiny_model("gpt2").train()
    expected = step(model)
    with attached(model, config) as offloader:
        for _ in range(NUM_MEASURED + NUM_FIRST_FORWARDS + 2):
            assert_same(step(model, None, offloader), expected)
        plan = offloader.plan
        assert plan is not None
        assert "recompute" in {s.action for s in plan.slots if s.name.startswith("mlp.act:")}
        assert offloader.metrics()["recomputed_bytes"] > 0


@pytest.mark.thorough
def test_a_plan_that_loses_is_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = tiny_model("gpt2").train()
    expected = step(model)
    result = PlanCheck.result

    def measured(check: PlanCheck) -> list[TimedMicroBatch]:
        """Return that everything offloaded takes no time, and what a plan takes."""
        found = result(check)
        return found if offloader.plan is not None else [TimedMicroBatch(10**9, 1e-9, 0.0)]

    monkeypatch.setattr(PlanCheck, "result", measured)
    with attached(model, capped("gpt2", 1.0 - 1e-3)) as offloader:
        for _ in range(2 * NUM_MEASURED + 4 * NUM_FIRST_FORWARDS + 4):
            assert_same(step(model, None, offloader), expected)
        assert offloader.plan is not None
        # The last layer stays, as it does where everything is offloaded.
        assert {slot.action for slot in offloader.plan.slots} == {"keep", "offload"}
    assert any("drops its plan" in record.getMessage() for record in caplog.records)


@pytest.mark.thorough
def test_copies_that_are_slower_than_measured_are_planned_for_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = tiny_model("opt").train()
    expected = step(model)
    config = capped("opt", 0.3)
    fast = replace(LINK, d2h_gib_per_s=20.0, h2d_gib_per_s=20.0)
    with attach(model, config, transport=SimulatedTransport(0, link=fast)) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        auto = offloader.auto
        assert auto is not None
        draft = auto.draft
        assert draft is not None and draft.chosen.timed.offloaded_bytes
        waiting = TimedMicroBatch(1, 2 * draft.chosen.step_ms, draft.chosen.step_ms)
        monkeypatch.setattr(PlanCheck, "result", lambda check: [waiting] * NUM_MEASURED)
        for _ in range(3 * NUM_MEASURED + 6):
            assert_same(step(model, None, offloader), expected)
        slower = auto.draft
        assert slower is not None
        links = [each.followed.planner.conditions.link for each in (slower, draft)]
        assert links[0].d2h_gib_per_s < links[1].d2h_gib_per_s
        assert slower.chosen.peak_bytes <= config.device_memory_gib * GIB
    said = [r.getMessage() for r in caplog.records if "than predicted)" in r.getMessage()]
    assert len(said) == 1


@pytest.mark.thorough
def test_running_out_of_memory_makes_the_plan_tighter() -> None:
    model = tiny_model("gpt2").train()
    expected = step(model)
    with attached(model, capped("gpt2", 0.9)) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, None, offloader)
        peaks = []
        while offloader.plan is not None:
            peaks.append(offloader.plan.facts.peak_bytes)
            assert len(peaks) < 40
            assert run_out(offloader)
            assert_same(step(model, None, offloader), expected)
        assert peaks == sorted(peaks, reverse=True)
        assert len(peaks) > 1
        assert "the device ran out of memory" in offloader.describe()


@pytest.mark.thorough
def test_what_the_device_could_not_hold_is_not_planned_for_a_larger_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = tiny_model("gpt2").train()
    small, large = batch_of(8), batch_of(10)
    expected = step(model, large)
    with attached(model, capped("gpt2", 0.9)) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, small, offloader)
        assert run_out(offloader)
        step(model, small, offloader)
        held = offloader.plan
        assert held is not None
        assert_same(step(model, large, offloader), expected)
        plan = offloader.plan
    assert plan is not None and plan is not held
    assert plan.facts.num_elements == 1.25 * held.facts.num_elements
    assert plan.facts.limit_bytes == held.facts.limit_bytes
    assert plan.facts.peak_bytes <= held.facts.limit_bytes
    assert AFTER_RUNNING_OUT in caplog.text


def dataset() -> list[dict[str, Any]]:
    batch = tiny_batch()
    return [{name: value[0] for name, value in batch.items()} for _ in range(12)]


def trained(folder: Path, model: nn.Module, resume: bool = False, **more: Any) -> PyAOTrainer:
    args = PyAOTrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=4,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        activation_offload=True,
        activation_offload_profile_steps=NUM_MEASURED,
        activation_offload_min_bytes=256,
        **more,
    )
    trainer = PyAOTrainer(model=model, args=args, train_dataset=dataset())
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.thorough
def test_a_trainer_saves_the_plan_and_resumes_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    cap = {"activation_offload_device_memory_gib": capped("opt", 0.5).device_memory_gib}
    torch.manual_seed(0)
    model = tiny_model("opt")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trained(tmp_path / "auto", model, **cap)
    plain = tiny_model("opt")
    plain.load_state_dict(start)
    trained(tmp_path / "off", plain, activation_offload_policy="off")
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    saved = tmp_path / "auto" / "checkpoint-4" / PLAN_FILE
    assert json.loads(saved.read_text())["kind"] == "plan"
    (tmp_path / "auto" / "checkpoint-6" / PLAN_FILE).unlink()
    for path in (tmp_path / "auto" / "checkpoint-6").iterdir():
        path.unlink()
    (tmp_path / "auto" / "checkpoint-6").rmdir()
    caplog.clear()
    resumed = tiny_model("opt")
    trained(tmp_path / "auto", resumed, resume=True, **cap)
    assert any("the plan in the checkpoint" in r.getMessage() for r in caplog.records)
    for a, b in zip(resumed.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.thorough
def test_accelerate_saves_the_plan_and_resumes_with_it(tmp_path: Path) -> None:
    cap = capped("opt", 0.5).device_memory_gib
    settings: dict[str, Any] = {"profile_steps": NUM_MEASURED, "min_bytes": 256}

    def prepared() -> tuple[Accelerator, PyAOPlugin, nn.Module]:
        accelerator = Accelerator(cpu=True)
        plugin = PyAOPlugin(policy="auto", device_memory_gib=cap, **settings).bind(accelerator)
        return accelerator, plugin, accelerator.prepare(tiny_model("opt").train())

    accelerator, plugin, model = prepared()
    for _ in range(NUM_MEASURED + 1):
        step(model)
    plan = plugin.offloaders[0].plan
    assert plan is not None
    accelerator.save_state(str(tmp_path / "state"))
    plugin.detach()
    accelerator, plugin, model = prepared()
    accelerator.load_state(str(tmp_path / "state"))
    assert plugin.offloaders[0].plan == plan
    step(model)
    assert plugin.offloaders[0].plan == plan
    plugin.detach()
    assert not accelerator._save_model_state_pre_hook
