"""Predictions from a profile: what was measured under one policy tells of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.cli import main
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.measure.profile_merge import merge_profiles
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import times_of
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.predict.profiled_step import ForecastError, ProfiledStep
from hf_pyao.plan.predictor.predicted_plans import compared, prediction_of
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.recorded_step import RecordedStep
from tests.helpers import EVERY_LAYER, tiny_batch, tiny_model
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport

SPEEDS = DeviceModel(tflop_per_s=0.01, memory_gib_per_s=5.0, launch_us=2.0)
LINK = LinkModel(d2h_gib_per_s=0.5, h2d_gib_per_s=0.7)
BINDS = PlanRequest.of_config(replace(EVERY_LAYER, window=0))


def step(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    model.zero_grad()
    model(**tiny_batch(), use_cache=False).loss.backward()


def run_on_a_clock(
    model: torch.nn.Module, config: PyAOConfig, num_steps: int = 1
) -> tuple[float, float, dict[str, float], Profile | None]:
    """Return compute and stall of the last step on a virtual clock, figures, and the profile."""
    transport = SimulatedTransport(0, link=LINK)
    assert transport.link is not None
    with attach(model, config, transport=transport) as offloader:
        device = SimulatedDevice(SPEEDS, transport.link, offloader.host_pool)
        before = (0.0, 0.0)
        for _ in range(num_steps):
            before = (transport.link.compute_ms, transport.link.stall_ms)
            with device:
                step(model)
        figures = offloader.metrics()
        if offloader.profile_writer is not None:
            offloader.profile_writer.finish()
            profile = offloader.profile_writer.profile
        else:
            profile = None
    step_ms = transport.link.compute_ms - before[0]
    return step_ms, transport.link.stall_ms - before[1], figures, profile


def profiled(architecture: str, folder: Path, **settings: Any) -> tuple[torch.nn.Module, Profile]:
    model = tiny_model(architecture)
    config = replace(
        EVERY_LAYER, window=0, profile=folder / "profile.json", profile_steps=1, **settings
    )
    *_, profile = run_on_a_clock(model, config)
    assert profile is not None
    assert profile.program is not None, profile.why_no_program
    return model, profile


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
@pytest.mark.sampled(every=1000)
def test_one_policy_tells_of_the_others(architecture: str, tmp_path: Path) -> None:
    """Measured once, under policy ``all``: other plans are predicted from it, and then run."""
    model, profile = profiled(architecture, tmp_path)
    profiled_step = ProfiledStep.of(profile, link=LINK)
    predictor = Predictor.of_profile(profiled_step, BINDS)
    budget_bytes = sum(s.nbytes for s in profiled_step.program.slots if s.stays is None) // 2
    cases = {
        "off": replace(EVERY_LAYER, policy="off"),
        "all": replace(EVERY_LAYER, window=0),
        "budget": replace(EVERY_LAYER, window=0, policy="budget", budget=f"{budget_bytes}B"),
    }
    for name, config in cases.items():
        step_ms, stall_ms, figures, _ = run_on_a_clock(model, config)
        predicted = predictor.at(1, Way.of_config(config)).timed
        assert predicted.offloaded_bytes == figures.get("offloaded_bytes", 0)
        assert predicted.step_ms == pytest.approx(step_ms, rel=0.05), name
        predicted_ms = predicted.stall_forward_ms + predicted.stall_backward_ms
        assert predicted_ms == pytest.approx(stall_ms, rel=0.1, abs=0.02 * step_ms), name
    kept, everything = (predictor.at(1, Way(name, name)) for name in ("off", "all"))
    assert everything.step_ms > 1.2 * kept.step_ms


@pytest.mark.thorough
def test_what_was_measured_stands_beside_what_is_predicted(tmp_path: Path) -> None:
    _, profile = profiled("llama", tmp_path)
    figures = {each.name: each for each in compared(ProfiledStep.of(profile), BINDS)}
    inside = figures["layers, head and loss"]
    assert inside.predicted == pytest.approx(inside.measured, rel=0.05)
    for name in ("offloaded_bytes", "host_peak_bytes"):
        assert figures[name].predicted == figures[name].measured > 0


@pytest.mark.thorough
def test_a_module_that_is_slow_is_slow_in_the_prediction(tmp_path: Path) -> None:
    _, profile = profiled("gpt2", tmp_path)
    slower = replace(
        profile,
        modules=[
            replace(
                module,
                forward=None
                if module.forward is None
                else replace(module.forward, mean_ms=module.forward.mean_ms * 10),
            )
            if module.path == "mlp.c_fc"
            else module
            for module in profile.modules
        ],
    )
    assert profile.program is not None
    program = RecordedStep.from_dict(profile.program).whole()
    share = []
    for each in (profile, slower):
        times_ms = times_of(each, program)
        layer = next(s for s in program.segments if s.layer == 1 and s.phase == "forward")
        inside = range(layer.start, layer.end)
        own_ms = sum(times_ms[n] for n in inside if program.operations[n].path == "mlp.c_fc")
        share.append(own_ms / sum(times_ms[n] for n in inside))
    assert share[1] > 2 * share[0]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a predicted profile, as the command writes it."""
    path = tmp_path_factory.mktemp("profiles") / "opt.json"
    model = "opt:hidden_size=64,word_embed_proj_dim=64,ffn_dim=128,num_attention_heads=4"
    model += ",num_hidden_layers=6,vocab_size=256"
    sizes = ["--micro-batch", "2", "--sequence-length", "64"]
    assert main(["profile", "--model", model, "--device", "rtx4070", *sizes, "-o", str(path)]) == 0
    return path


@pytest.mark.thorough
def test_a_predicted_profile_says_so_and_predicts_the_same(
    predicted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile.from_dict(json.loads(predicted.read_text()))
    assert not profile.is_measured
    assert profile.program is not None
    program = RecordedStep.from_dict(profile.program).whole()
    assert profile.speeds is not None
    device = DeviceModel(**profile.speeds)
    assert times_of(profile, program) == operation_times_ms(program, device)
    profiled_step = ProfiledStep.of(profile)
    binds = replace(BINDS, window_bytes=2**28, keep_last_layers=1)
    found = Predictor.of_profile(profiled_step, binds).at(1, Way("all", "all"))
    leaves, link = found.step.leaves, profiled_step.link
    direct = predict(program, leaves, window_bytes=2**28, device=device, link=link)
    assert found.timed == direct
    assert main(["plan", str(predicted), "--try", "--device-memory", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "(too much)" in printed
    assert "no figure here was measured" in printed
    assert "as it was profiled" not in printed.partition("| plan |")[2]
    total_ms = sum(
        each.forward.mean_ms for each in profile.modules if each.forward and "." not in each.path
    )
    assert profile.layer_forward is not None
    assert total_ms <= profile.layer_forward.mean_ms * (1 + 1e-9)


@pytest.mark.thorough
def test_a_plan_is_predicted(predicted: Path, tmp_path: Path) -> None:
    profile = Profile.from_dict(json.loads(predicted.read_text()))
    profiled_step = ProfiledStep.of(profile)
    plan = Plan(
        slots=[PlannedSlot(name="activation_fn:0", action="offload", layers=[0, 2])],
        otherwise="keep",
        model=profile.model,
    )
    step = Predictor.of_profile(profiled_step, BINDS).at(1, Way("mine", plan=plan)).step
    chosen = [s for s, leaves in zip(step.program.slots, step.leaves, strict=True) if leaves]
    assert [(slot.layer, slot.name) for slot in chosen] == [
        (0, "activation_fn:0"),
        (2, "activation_fn:0"),
    ]
    path = tmp_path / "plan.json"
    plan.to_json_file(path)
    output = tmp_path / "prediction.json"
    assert main(["plan", str(predicted), "--try", str(path), "--save", str(output)]) == 0
    assert main(["report", str(output)]) == 0
    for bad, words in (
        (replace(plan, model={"num_layers": 99}), "another model"),
        (replace(plan, recomputed_modules=["activation_fn"]), "as a whole"),
        (replace(plan, slots=[PlannedSlot(name="mlp:7", action="keep")]), "has not"),
    ):
        with pytest.raises(PlanError, match=words):
            prediction_of(profiled_step, BINDS, {"bad": bad}, limit_bytes=None, device_name="x")


Spoil = Callable[[dict[str, Any]], None]


def _spoil(**changes: Any) -> Spoil:
    return lambda values: values.update(changes)


def _spoil_program(**changes: Any) -> Spoil:
    return lambda values: values["program"].update(changes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_spoil(program=None, why_no_program="compiled."), "not in the profile"),
        (_spoil(link={}, speeds=None), "link's speed"),
        (_spoil(link={"d2h_gib_per_s": -1.0, "h2d_gib_per_s": -1.0}), "more than 0"),
        (_spoil(schema_version=1), "schema_version"),
        (_spoil(kind="colour"), "kind"),
        (_spoil_program(operations=["[]"]), "damaged"),
        (_spoil_program(operations=["not JSON"]), "damaged"),
        (_spoil_program(buffers=["[1,2,3]"]), "damaged"),
        (_spoil_program(segments=[]), "damaged"),
        (_spoil_program(resident_bytes=-1), "damaged"),
        (_spoil_program(resident_bytes=10**30), "damaged"),
        (_spoil_program(buffers=["[" * 5000 + "]" * 5000]), "damaged"),
        (_spoil(speeds={}), "tflop_per_s"),
        (_spoil_program(recorded_layer_names=["a"]), "damaged"),
        (lambda values: values["program"].pop("slots"), "damaged"),
    ],
)
def test_bad_profiles_are_refused(
    spoil: Spoil,
    words: str,
    predicted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = json.loads(predicted.read_text())
    spoil(values)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    assert main(["plan", str(path), "--try"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.thorough
def test_a_profile_of_another_model_or_of_other_shapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    config = replace(EVERY_LAYER, profile=path, profile_steps=1)
    caplog.set_level("INFO")

    def run(architecture: str, length: int) -> Profile:
        model = tiny_model(architecture)
        with attach(model, config) as offloader:
            for _ in range(2):
                batch = {key: value[:, :length] for key, value in tiny_batch().items()}
                model(**batch, use_cache=False).loss.backward()
            assert offloader.profile_writer is not None
            profile = offloader.profile_writer.profile
        assert profile is not None
        return profile

    first = run("opt", 8)
    assert run("opt", 8) == first
    assert "nothing is measured" in caplog.text
    other = run("opt", 6)
    assert "made anew: shapes" in caplog.text
    assert other.shapes[0] == "input_ids int64[2, 6]"
    with pytest.raises(ReportError, match=r"another model.*Name another file, or delete"):
        run("gpt2", 8)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ReportError, match="delete"):
        run("opt", 8)
    model = tiny_model("opt")
    with pytest.raises(ReportError):
        attach(model, config)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.thorough
def test_ranks_are_one_profile(tmp_path: Path) -> None:
    _, profile = profiled("opt", tmp_path)
    assert profile.layer_forward is not None
    slower = replace(
        profile,
        layer_forward=replace(
            profile.layer_forward,
            mean_ms=3 * profile.layer_forward.mean_ms,
            most_ms=5 * profile.layer_forward.most_ms,
        ),
        link={"d2h_gib_per_s": 0.1, "h2d_gib_per_s": None},
    )
    merged = merge_profiles([profile, slower])
    assert merged.num_ranks == 2
    assert merged.layer_forward is not None
    assert merged.layer_forward.mean_ms == pytest.approx(2 * profile.layer_forward.mean_ms)
    assert merged.layer_forward.least_ms == profile.layer_forward.least_ms
    assert merged.layer_forward.most_ms == 5 * profile.layer_forward.most_ms
    assert merged.link["least_d2h_gib_per_s"] == 0.1
    assert merged.link["h2d_gib_per_s"] == profile.link["h2d_gib_per_s"]
    assert Profile.from_dict(json.loads(json.dumps(merged.to_dict()))) == merged


@pytest.mark.thorough
def test_without_a_step_nothing_is_predicted(tmp_path: Path) -> None:
    _, profile = profiled("opt", tmp_path)
    with pytest.raises(ForecastError, match=r"no reason.*profile the plain model"):
        ProfiledStep.of(replace(profile, program=None))
