"""RunReport: written from a real run, read back whole, refused by name when it is another's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.provenance import source_digest
from hf_pyao.plan.documents.run import RunReport, write_run_report
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.tools.report.kinds import read_document
from tests.helpers.documents import make_run

SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A report that two micro-batches left, and the totals that it should hold."""
    path = tmp_path_factory.mktemp("run") / "deep" / "run.json"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    ids = torch.randint(0, 64, (2, 16))
    with attach(model, PyAOConfig(policy="all", min_bytes=0, report=str(path))) as offloader:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        totals = offloader.totals()
        write_run_report(offloader, extra={"name": "a run", "losses": [1.0, float("nan")]})
    return path, totals


def test_it_has_the_bytes_of_each_layer(trained: tuple[Path, dict[str, float]]) -> None:
    report = read_document(trained[0])
    assert [layer.layer for layer in report.layers] == report.layer_names
    figures = report.last_micro_batch
    assert sum(layer.moved_bytes for layer in report.layers) == figures["offloaded_bytes"]
    assert sum(layer.kept_bytes for layer in report.layers) == figures["held_bytes"]
    first, *_, last = report.layers
    assert first.moved_bytes > 0
    assert (last.moved_bytes, last.recomputed_bytes) == (0, 0)


@pytest.mark.parametrize("save_attention", [False, True])
def test_layers_that_run_again_add_up_too(save_attention: bool, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    config = PyAOConfig(policy="all", min_bytes=0, report=str(tmp_path / "run.json"))
    config = config.with_settings(checkpoint_every=2, save_attention=save_attention)
    with attach(model, config) as offloader:
        for length in (5, 9):
            ids = torch.randint(0, 64, (2, length))
            model(input_ids=ids, labels=ids).loss.backward()
        layers, figures = offloader.layer_bytes, offloader.metrics()
    assert sum(layer.recomputed_bytes for layer in layers) == figures["recomputed_bytes"]
    shares = [layer.kept_bytes + layer.moved_bytes + layer.recomputed_bytes for layer in layers]
    assert sum(shares) == figures["would_hold_bytes"]


def test_a_micro_batch_that_fails_is_not_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    ids = torch.randint(0, 64, (1, 8))
    config = PyAOConfig(policy="all", min_bytes=0, report=str(tmp_path / "run.json"))

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with attach(model, config) as offloader:
        with (
            model.model.layers[1].register_forward_pre_hook(fail),
            pytest.raises(ValueError, match="on purpose"),
        ):
            model(input_ids=ids, labels=ids)
        assert offloader.layer_bytes == []
        model(input_ids=ids, labels=ids).loss.backward()
        moved = sum(layer.moved_bytes for layer in offloader.layer_bytes)
        assert moved == offloader.metrics()["offloaded_bytes"]


def test_without_a_report_nothing_is_listened_to() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    with attach(model, PyAOConfig(policy="all")) as offloader:
        assert offloader.engine.observer is None
        assert offloader.layer_bytes == []


def test_it_is_read_back_whole(trained: tuple[Path, dict[str, float]]) -> None:
    path, totals = trained
    report = read_document(path)
    assert isinstance(report, RunReport)
    assert report.totals == totals
    assert report.totals["num_micro_batches"] == 2
    assert report.totals["offloaded_bytes"] == 2 * report.last_micro_batch["offloaded_bytes"] > 0
    assert report.layer_names == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert report.policy == "all"
    assert PyAOConfig.from_dict(report.config).report == str(path)
    assert report.device == "cpu"
    assert torch.__version__.startswith(report.versions["torch"] or "?")
    assert report.provenance.source_sha256 == source_digest()
    assert RunReport.from_dict(report.to_dict()) == report


def test_it_is_valid_json_without_nan(trained: tuple[Path, dict[str, float]]) -> None:
    path, _ = trained
    text = path.read_text(encoding="utf-8")
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert plain["schema_version"] == 1
    assert plain["kind"] == "run"
    assert plain["extra"] == {"name": "a run", "losses": [1.0, None]}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "a part was left"


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**make_run().to_dict(), "schema_version": 7}))
    with pytest.raises(ReportError, match=r"old\.json.*schema_version 7.*version 1 of a RunReport"):
        RunReport.from_json_file(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"polcy": "all"}, r"'polcy', which RunReport has not; did you mean 'policy'"),
        ({"provenance": {"command": "x", "comit": "y"}}, r"provenance has the key 'comit'"),
        ({"provenance": "me"}, r"provenance holds a JSON str; expected an object"),
    ],
)
def test_an_unknown_key_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        RunReport.from_dict({**make_run().to_dict(), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds a JSON list; expected an object"),
        ("{}", "has kind None; known: run, bench, facts"),
        ('{"kind": "rum"}', r"has kind 'rum'; did you mean 'run'\?"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        read_document(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read .*none\.json.*No such file"):
        read_document(tmp_path / "none.json")


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    with attach(model) as offloader:
        assert write_run_report(offloader) is None
    assert list(tmp_path.iterdir()) == []


def test_reports_and_the_command_line_import_no_torch() -> None:
    program = (
        "import sys, hf_pyao.tools.report, hf_pyao.tools.report.pages, hf_pyao.cli\n"
        "hf_pyao.cli.make_parser().format_help()\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("path", "extra", "message"),
    [
        ("a\0b.json", {}, "null byte"),
        ("x" * 300, {}, "File name too long"),
        ("run.json", {"model": object()}, "not JSON serializable"),
        ("run.json", {"x": (loop := [])}, "recursion"),
    ],
)
def test_whatever_goes_wrong_is_logged_and_no_error(
    path: str,
    extra: dict[str, object],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop.append(loop)
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    with attach(model) as offloader:
        write_run_report(offloader, tmp_path / path, extra)
    assert "the run report is lost" in caplog.text
    assert message in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_refused_when_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    config = PyAOConfig(policy="all", report=str(tmp_path / "file" / "run.json"))
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS)).train()
    with pytest.raises(ConfigError, match=r"report is '.*run\.json', and '.*file' is no folder"):
        attach(model, config)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="this process may not write to"):
        attach(model, PyAOConfig(policy="all", report=str(tmp_path / "new" / "run.json")))
    monkeypatch.setenv("RANK", "1")  # which writes no report, and may see other disks
    attach(model, config).detach()
