"""``pyao plan``: of a model, of a profile; saved, followed, compared, drawn; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.cli import main
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.tools.estimate.fake_step import build_model
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.report.kinds import figure_of, read_document

MODEL = "llama:hidden_size=64,intermediate_size=128,num_hidden_layers=5,num_attention_heads=4,vocab_size=128"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "profile.json"
    # Large enough that the allocator's segments of 2 and 20 MiB do not decide what fits.
    arguments = ["--micro-batch", "64", "--sequence-length", "64", "--device", "rtx4070"]
    assert main(["profile", "--model", MODEL, *arguments, "-o", str(path)]) == 0
    return path


def planned(*arguments: str, path: Path) -> Plan:
    assert main(["plan", *arguments, "--save", str(path)]) == 0
    return Plan.from_json_file(path)


def test_a_profile_of_version_0_1_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says which of its settings are gone."""
    profile = Path(__file__).parents[2] / "plan" / "documents" / "version_0_1"
    given = (str(profile / "budget_profile.json"), "--device-memory", "1GiB")
    plan = planned(*given, path=tmp_path / "plan.json")
    assert "activation_memory_budget" not in plan.levers
    lines = "".join(capsys.readouterr()).splitlines()
    assert sum("activation_memory_budget is 0.5; this setting was" in each for each in lines) == 1


@pytest.mark.thorough
def test_a_profile_is_planned_for_within_its_memory(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = planned(str(profile), "--device-memory", "1GiB", path=tmp_path / "whole.json")
    assert {slot.action for slot in whole.slots} == {"keep"}
    limit = int(_tight(profile, tmp_path))
    plan = planned(str(profile), "--device-memory", str(limit), path=tmp_path / "plan.json")
    assert plan.facts.peak_bytes <= plan.facts.needed_bytes <= limit
    assert {slot.action for slot in plan.slots} != {"keep"}
    assert sum(point.is_chosen for point in plan.front) == 1
    out = capsys.readouterr().out
    assert "what was looked at" in out
    assert "hide under compute" in out or "rebuilt in" in out
    assert (
        main(["plan", "--compare", str(tmp_path / "whole.json"), str(tmp_path / "plan.json")]) == 0
    )
    assert "slots are treated alike" in capsys.readouterr().out
    assert figure_of(read_document(tmp_path / "plan.json")) is not None
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html")]) == 0


@pytest.mark.thorough
def test_a_saved_plan_is_followed_and_comes_to_what_it_says(profile: Path, tmp_path: Path) -> None:
    chosen = planned(
        str(profile), "--device-memory", _tight(profile, tmp_path), path=tmp_path / "p"
    )
    torch.manual_seed(0)
    model = build_model(config_of(parse_model(MODEL)), checkpointing=False)
    ids = torch.zeros(64, 64, dtype=torch.int64)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    config = PyAOConfig(policy="plan", plan=str(tmp_path / "p"))
    with attach(model, config) as offloader:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for parameter, gradient in zip(
            (p for p in model.parameters() if p.grad is not None), expected, strict=True
        ):
            assert torch.equal(parameter.grad, gradient)
        metrics = offloader.metrics()
    assert metrics["offloaded_bytes"] + metrics["recomputed_bytes"] > 0
    assert offloader.plan == chosen


def _tight(profile: Path, folder: Path) -> str:
    """Return memory that keeping everything does not fit, and the smallest plans do."""
    whole = planned(str(profile), "--device-memory", "1GiB", path=folder / "whole.json")
    least_bytes = min(point.peak_bytes for point in whole.front)
    return str((whole.facts.kept_peak_bytes + least_bytes) // 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a profile, a model, or --compare"),
        (["{profile}"], "give --device-memory"),
        (["{profile}", "--device-memory", "2 elephants"], "--device-memory is '2 elephants'"),
        (["{profile}", "--device-memory", "1KiB"], "no plan fits 0.000977 MiB"),
        (["--compare", "one.json"], "--compare takes two or more"),
        (["nosuch.json", "--device-memory", "1GiB"], "nosuch.json"),
        (["opt:1.3b", "--micro-batch", "0"], "--micro-batch is 0; expected 1 or more"),
        (["opt:1.3c"], "1.3c"),
        (["{profile}", "--device", "rtx9999"], "rtx9999"),
        (["{profile}", "--device-memory", "1GiB", "--window", "wide"], "window"),
        (["{profile}", "--device-memory", "1GiB", "--engine", "zero2"], "--engine: of a model's"),
        (["{profile}", "--device-memory", "1GiB", "--deterministic"], "--deterministic: of a"),
        ([MODEL, "--optimizer-step", "foreach", "--device-memory", "1MB"], "optimizer's step"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], message: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each.format(profile=profile) for each in arguments]
    assert main(["plan", *given]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_bucket_is_counted_where_it_is_asked_for_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = planned(MODEL, path=tmp_path / "plain.json")
    assert "bucket_bytes" not in plain.figures
    assert plain.figures["workspace_bytes"] > 0
    assert "engine plain" in capsys.readouterr().out
    bucket = planned(MODEL, "--engine", "zero2", path=tmp_path / "bucket.json")
    assert bucket.figures["bucket_bytes"] == 1e9
    assert "a bucket of 1.00 GB" in capsys.readouterr().out
    assert 0.9e9 < bucket.facts.kept_peak_bytes - plain.facts.kept_peak_bytes < 1e9


@pytest.mark.thorough
def test_plan_and_find_count_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(MODEL, "--micro-batch", "4", path=tmp_path / "plan.json")
    path = tmp_path / "choice.json"
    arguments = ["--model", MODEL, "--global-batch", "4", "--micro-batches", "4"]
    assert main(["estimate", "--find", "micro-batch", *arguments, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["peak_bytes"] == plan.facts.kept_peak_bytes


@pytest.mark.thorough
def test_a_card_and_its_link_can_be_exchanged(profile: Path, tmp_path: Path) -> None:
    limit = _tight(profile, tmp_path)
    arguments = (str(profile), "--device-memory", limit, "--device")
    slow = planned(*arguments, "h200", "--link", "1GiB/s", path=tmp_path / "slow.json")
    fast = planned(*arguments, "h200", "--link", "500GiB/s", path=tmp_path / "fast.json")
    for plan in (slow, fast):
        assert plan.facts.peak_bytes <= plan.facts.needed_bytes <= int(limit)
    assert slow.figures["step_ms/offload everything"] > fast.figures["step_ms/offload everything"]
