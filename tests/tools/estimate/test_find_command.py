"""``pyao estimate --find``: a choice for a small model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from hf_pyao.cli import main
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.microbatch import MicroBatchReport
from hf_pyao.quantities import number
from hf_pyao.tools.estimate.model_specs import with_layers
from hf_pyao.tools.report.kinds import read_document

ESTIMATE = ("estimate", "--model", "llama:micro")
FASTEST = (*ESTIMATE, "--find", "micro-batch", "--sequence-length", "32")


@pytest.mark.thorough
def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "choice.json"
    assert main([*FASTEST, "--global-batch", "4", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    report = read_document(path)
    assert isinstance(report, MicroBatchReport)
    assert report.verdict.startswith("Fastest: micro-batch ")
    assert report.verdict.replace("'", "") in printed.replace("'", "")
    assert [row.micro_batch for row in report.rows] == [1, 2, 4]
    assert report.chosen in report.rows
    times = [row.sample_ms or 0.0 for row in report.rows]
    assert min(times) * 1.001 >= (report.chosen.sample_ms or 0.0)  # type: ignore[union-attr]
    assert report.setup["num_recorded_steps"] == 3
    assert "assumed: where gradients are accumulated" in printed
    # Behind another micro-batch gradients are there from the start.
    assert report.rows[0].peak_bytes > 0


@pytest.mark.thorough
def test_what_does_not_fit_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--device-memory",
        "670MiB",
        "--micro-batches",
        "2,4",
        "--find",
        "largest-micro-batch",
        "--json",
    )
    assert main([*FASTEST, *options]) == 1
    report = MicroBatchReport.from_dict(json.loads(capsys.readouterr().out))
    assert report.chosen is None
    assert report.verdict.startswith("Nothing fits")
    assert [row.fits for row in report.rows] == [False]


@pytest.mark.thorough
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--find", "sequence", "--device-memory", "800MiB", "--json")
    assert main([*ESTIMATE, *options]) == 0
    report = MicroBatchReport.from_dict(json.loads(capsys.readouterr().out))
    assert report.chosen is not None
    lengths = {row.sequence_length: row.fits for row in report.rows}
    assert lengths[report.chosen.sequence_length]
    assert not lengths[report.chosen.sequence_length + 64]
    assert report.global_batch is None


@pytest.mark.thorough
def test_the_deepest_model_fits_and_a_deeper_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "gpt2:n_embd=64,n_head=4,n_positions=64,vocab_size=512"
    training = ("--sequence-length", "32", "--micro-batch", "2", "--device-memory", "690MiB")
    options = ("estimate", "--model", f"{sizes},n_layer=2", "--find", "model-size", "--json")
    assert main([*options, *training]) == 0
    report = MicroBatchReport.from_dict(json.loads(capsys.readouterr().out))
    assert report.chosen is not None
    layers = report.chosen.num_layers or 0
    assert layers > 2
    fits = {row.num_layers: row.fits for row in report.rows}
    assert fits[layers] and not fits[layers + 1]
    parameters = 512 * 64 + 64 * 64 + 2 * 64 + layers * (12 * 64 * 64 + 13 * 64)
    assert f"{layers} layers, {number(parameters / 1e9)} billion parameters" in report.verdict
    # Whether one micro-batch of these models fits is asked in another way, too.
    for depth, is_enough in ((layers, True), (layers + 1, False)):
        model = ("estimate", "--model", f"{sizes},n_layer={depth}", "--find", "largest-micro-batch")
        given = ("--micro-batches", "2", "--sequence-length", "32", "--device-memory", "690MiB")
        assert main([*model, *given, "--json"]) == (0 if is_enough else 1)
        capsys.readouterr()


def test_layers_of_several_kinds_go_on_in_turn() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=7)
    changed = with_layers(config, 9)
    assert changed.num_hidden_layers == len(changed.layer_types) == 9
    assert changed.layer_types[:7] == config.layer_types
    assert changed.layer_types[7:] == config.layer_types[:2]
    assert config.num_hidden_layers == 7
    assert with_layers(AutoConfig.for_model("gpt2"), 3).n_layer == 3
    with pytest.raises(ConfigError, match="no number of layers"):
        with_layers(_Layerless(), 3)


class _Layerless(PretrainedConfig):
    model_type = "layerless"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--global-batch", "64", "--micro-batches", "3"), "micro-batch of 3 does not divide"),
        (("--global-batch", "0"), "--global-batch is 0; expected 1 or more"),
        (("--micro-batches", "2,x"), "--micro-batches is '2,x'; expected whole numbers"),
        (
            ("--micro-batch", "2"),
            "--micro-batch is given, which has no effect with --find micro-batch",
        ),
        (("--find", "sequence"), "--sequence-length is given, which has no effect with"),
        (("--find", "model-size", "--micro-batches", "2"), "--micro-batches is given, which has"),
        (("--step", "step.json"), "--step has no effect with --find"),
        (("--device", "b300"), "unknown device 'b300'"),
        (("--host-memory", "much"), "--host-memory is 'much'"),
    ],
)
def test_bad_options_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FASTEST, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [("--global-batch", "8"), ("--host-memory", "1GiB"), ("--mlp-tiles", "4")]
)
def test_without_find_its_options_are_refused(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ESTIMATE, *options]) == 2
    assert f"{options[0]} has no effect without --find" in capsys.readouterr().err
