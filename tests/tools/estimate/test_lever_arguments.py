"""Commands that take long context, and each part of it alone: what they record, and refuse."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.cli import main
from hf_pyao.errors import ConfigError
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.documents.microbatch import MicroBatchReport
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.profiled_step import ProfiledStep
from hf_pyao.plan.predictor.predicted_plans import levers_profiled
from hf_pyao.plan.predictor.predictor import Predictor
from hf_pyao.plan.predictor.way import Way
from hf_pyao.tools.estimate.lever_arguments import levers_of
from hf_pyao.tools.option_table import add_rows
from hf_pyao.tools.report.kinds import read_document

MODEL = "llama:hidden_size=64,intermediate_size=512,num_hidden_layers=5,num_attention_heads=4,vocab_size=128"
SIZE = ("--micro-batch", "2", "--sequence-length", "128")
LONG_CONTEXT = Levers.of(PyAOConfig(long_context=True))
INPUT, ATTENTION = ":0", "self_attn:1"


def given(*options: str) -> Levers:
    parser = argparse.ArgumentParser()
    add_rows(parser, "levers")
    return levers_of(parser.parse_args(options))


def setting(document: Any) -> Levers:
    """Return what a document says that was given."""
    return Levers(**{name: document[name] for name in Levers.names()})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), NO_LEVERS),
        (("--head-loss", "chunked"), Levers(head_loss="chunked")),
        (("--mlp-tiles", "auto"), Levers(mlp_tiles="auto")),
        (("--mlp-tiles", "8"), Levers(mlp_tiles=8)),
        (("--mlp-tiles", "1"), NO_LEVERS),
        (
            ("--checkpoint-every", "4", "--save-attention"),
            Levers(checkpoint_every=4, save_attention=True),
        ),
        (
            ("--checkpoint-every", "4", "--checkpoint-nested"),
            Levers(checkpoint_every=4, checkpoint_nested=True),
        ),
        (
            ("--long-context", "--checkpoint-every", "2", "--no-checkpoint-nested"),
            replace(LONG_CONTEXT, checkpoint_every=2),
        ),
        (("--long-context",), LONG_CONTEXT),
        (
            ("--long-context", "--head-loss", "off", "--mlp-tiles", "off", "--no-save-attention"),
            Levers(checkpoint_every=1, attention_groups="auto"),
        ),
        (
            ("--long-context", "--checkpoint-every", "0"),
            Levers(head_loss="chunked", mlp_tiles="auto", attention_groups="auto"),
        ),
    ],
)
def test_options_are_the_configurations_fields(options: tuple[str, ...], expected: Levers) -> None:
    assert given(*options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mlp-tiles", "many"), "--mlp-tiles is 'many'; expected 'off', 'auto', or a whole"),
        (("--mlp-tiles", "0"), "--mlp-tiles is 0; expected 'off', 'auto'"),
        (("--checkpoint-every", "-1"), "--checkpoint-every is -1; it cannot be negative"),
        (("--checkpoint-every", "two"), "--checkpoint-every is 'two'; expected a whole number"),
        (("--save-attention",), "--save-attention is on, which has no effect while --checkpoint-"),
        (("--checkpoint-nested",), "--checkpoint-nested is on, which has no effect while --check"),
    ],
)
def test_bad_values_are_refused_by_the_name_of_the_option(
    options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        given(*options)
    assert message in str(caught.value)


@pytest.mark.thorough
def test_a_micro_batch_is_chosen_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    find = ("estimate", "--find", "micro-batch", "--model", "llama:micro")
    length = ("--sequence-length", "64", "--micro-batches", "4", "--global-batch", "8", "--json")
    reports = []
    for options in ((), ("--long-context", "--mlp-tiles", "4")):
        assert main([*find, *length, *options]) == 0
        reports.append(MicroBatchReport.from_dict(json.loads(capsys.readouterr().out)))
    plain, long = reports
    assert setting(plain.setup) == NO_LEVERS
    assert setting(long.setup).mlp_tiles == 4 and setting(long.setup).checkpoint_every == 1
    assert "MLPs in 4 tiles, each layer run again" in long.title and "tiles" not in plain.title
    assert long.rows[0].peak_bytes < plain.rows[0].peak_bytes
    assert long.rows[0].step_ms > plain.rows[0].step_ms


@pytest.mark.thorough
def test_a_profile_has_the_step_with_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ("--checkpoint-every", "2", "--save-attention", "-o", str(path))
    assert main(["profile", "--model", MODEL, *SIZE, *options]) == 0
    profile = read_document(path)
    assert isinstance(profile, Profile)
    assert setting(profile.settings) == Levers(checkpoint_every=2, save_attention=True)
    num_layers = {slot.name: slot.num_layers for slot in profile.slots}
    assert num_layers[INPUT] == 3 and num_layers[ATTENTION] == 5  # of five layers
    assert not any(name.startswith("mlp") for name in num_layers)
    binds = PlanRequest.of_config(PyAOConfig(keep_last_layers=2, min_bytes=0))
    binds = dataclasses.replace(binds, levers=levers_profiled(profile))
    predictor = Predictor.of_profile(ProfiledStep.of(profile), binds)
    step = predictor.at(1, Way("all", "all")).step  # of layers 3 and 4: from 2 on
    slots = zip(step.program.slots, step.leaves, strict=True)
    assert {slot.layer for slot, slot_leaves in slots if slot_leaves} == {0, 1}
    plan = tmp_path / "plan.json"
    assert main(["plan", str(path), "--device-memory", "2GiB", "--save", str(plan)]) == 0
    assert {slot.name for slot in Plan.from_json_file(plan).slots} <= set(num_layers)


@pytest.mark.thorough
def test_a_plan_is_for_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    options = ("--micro-batch", "16", "--sequence-length", "128", "--long-context")
    given = ("--checkpoint-every", "1", "--save-attention")
    assert main(["plan", MODEL, *options, *given, "--save", str(path)]) == 0
    assert {slot.name for slot in Plan.from_json_file(path).slots} == {INPUT, ATTENTION}
    told = "follow it with: head_loss='chunked', mlp_tiles='auto', checkpoint_every=1, save_a"
    assert told in capsys.readouterr().out


@pytest.mark.thorough
def test_what_long_context_implies_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is memory, no layer runs again; the loss and tiles stay as asked for."""
    path = tmp_path / "plan.json"
    options = ("--micro-batch", "16", "--sequence-length", "128", "--long-context")
    assert main(["plan", MODEL, *options, "--save", str(path)]) == 0
    plan = Plan.from_json_file(path)
    assert plan.levers == {
        "head_loss": "chunked",
        "mlp_tiles": "auto",
        "checkpoint_every": 0,
        "checkpoint_nested": False,
        "save_attention": False,
        "attention_groups": "auto",
    }
    out = capsys.readouterr().out
    assert "layers do not run again as a whole" in out and "levers that were looked at" in out
    assert "follow it with: head_loss='chunked', mlp_tiles='auto'\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("profile", "--long-context", "train.py"),
            "--long-context: of a step that is predicted, and this one is measured",
        ),
        (
            ("plan", "profile.json", "--mlp-tiles", "4", "--head-loss", "chunked"),
            "--head-loss, --mlp-tiles: of a model's step, and the step of a profile is as it was",
        ),
        (
            ("sweep", "--model", MODEL, "--predict", "--checkpointing", "--long-context"),
            "--checkpointing and --long-context both have layers run again",
        ),
        (
            ("sweep", "--model", MODEL, "--checkpointing", "--checkpoint-every", "2"),
            "--checkpointing and --checkpoint-every both have layers run again",
        ),
        (
            ("estimate", "--find", "micro-batch", "--model", MODEL, "--save-attention"),
            "--save-attention is on, which has",
        ),
    ],
)
def test_what_would_change_nothing_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
