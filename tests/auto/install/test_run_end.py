"""What a run leaves behind, however it ends: its report, a line, and what the offloader says."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_pyao import PyAOCallback, PyAOPlugin, PyAOTrainer, attach
from hf_pyao.plan.documents.run import RunReport, write_run_report
from tests.helpers import EVERYTHING, tiny_batch, tiny_model
from tests.hf.test_trainer import FailsAt, arguments, tiny_opt, trainer_for

ERRORS = {
    "failed: ValueError": ValueError("no"),
    "failed: OutOfMemoryError": torch.OutOfMemoryError("no"),
    "interrupted": KeyboardInterrupt(),
    "failed: SystemExit": SystemExit(1),
}


def step(model: Any) -> None:
    model(**tiny_batch()).loss.backward()


def read(path: Path) -> RunReport:
    return RunReport.from_json_file(path)


# ---- attach --------------------------------------------------------------------------------------


def test_leaving_the_context_writes_the_report(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    model = tiny_model("llama")
    with attach(model, replace(EVERYTHING, report=str(path))) as offloader:
        step(model)
        step(model)
        offloader.report_extra["name"] = "mine"
        assert not path.exists()
    report = read(path)
    assert report.outcome == "finished"
    assert report.totals == offloader.totals()
    assert report.totals["num_micro_batches"] == 2
    assert report.extra == {"name": "mine"}


@pytest.mark.parametrize("outcome", ERRORS)
def test_an_error_inside_the_context_is_the_users_and_is_in_the_report(
    outcome: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    model = tiny_model("llama")
    error = ERRORS[outcome]
    with pytest.raises(type(error)) as raised:
        with attach(model, replace(EVERYTHING, report=str(path))):
            step(model)
            raise error
    assert raised.value is error
    report = read(path)
    assert report.outcome == outcome
    assert report.totals["offloaded_bytes"] > 0


def test_detach_knows_the_error_that_it_is_called_in_the_handling_of(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    config = replace(EVERYTHING, report=str(path))
    model = tiny_model("llama")

    def train(error: Exception | None) -> None:
        offloader = attach(model, config)
        try:
            step(model)
            if error is not None:
                raise error
        finally:
            offloader.detach()
            offloader.detach()

    train(None)
    assert read(path).outcome == "finished"
    try:
        train(ValueError("no"))
    except ValueError:
        assert read(path).outcome == "failed: ValueError"
        train(None)  # a second try inside of the handler is no failure
    assert read(path).outcome == "finished"


@pytest.mark.parametrize("broken", ["path", "figures", "extra"])
def test_a_report_that_cannot_be_made_hides_no_error_and_raises_none(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.json"
    config = replace(EVERYTHING, report=str(path))

    def train(error: Exception | None) -> None:
        model = tiny_model("llama")
        with attach(model, config) as offloader:
            step(model)
            if broken == "path":
                path.mkdir()
            if broken == "figures":
                offloader.transport.bandwidth = lambda: 1 / 0  # type: ignore[method-assign]
            if broken == "extra":
                offloader.report_extra["name"] = object()
            if error is not None:
                raise error

    train(None)
    assert "the run report is lost" in caplog.text
    caplog.clear()
    if broken == "path":
        path.rmdir()
    with pytest.raises(ValueError, match="the user's"):
        train(ValueError("the user's"))
    assert "the run report is lost" in caplog.text


@pytest.mark.thorough
def test_the_report_of_an_offloader_that_was_never_detached(tmp_path: Path) -> None:
    """Its model goes: what it did is written all the same."""
    path = tmp_path / "r.json"

    def train() -> None:
        model = tiny_model("llama")
        attach(model, replace(EVERYTHING, report=str(path)))
        step(model)

    train()
    gc.collect()
    report = read(path)
    assert report.outcome == "unknown"
    assert report.totals["offloaded_bytes"] > 0


SCRIPT = """
import sys, torch
from hf_pyao import PyAOConfig, attach
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
                              for _ in range(3)))
offloader = attach(model, PyAOConfig(policy="all", min_bytes=0, layers=("*",), report=sys.argv[1]))
model(torch.randn(4, 8)).sum().backward()
{last}
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ("raise ValueError('no')", "failed: ValueError"),
        pytest.param("", "unknown", marks=pytest.mark.thorough),
    ],
)
def test_the_report_is_written_when_the_process_ends(
    last: str, outcome: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last), path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == (1 if last else 0), done.stderr
    assert read(path).outcome == outcome
    assert read(path).totals["num_micro_batches"] == 1


def test_only_the_first_of_several_processes_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    monkeypatch.setenv("RANK", "1")
    with attach(tiny_model("llama"), replace(EVERYTHING, report=str(path))):
        pass
    assert not path.exists()


def test_what_is_written_by_hand_says_that_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    model = tiny_model("llama")
    with attach(model, replace(EVERYTHING, report=str(path))) as offloader:
        step(model)
        write_run_report(offloader, extra={"name": "kept"})
        assert read(path).outcome == "running"
        step(model)
    report = read(path)
    assert (report.outcome, report.extra) == ("finished", {"name": "kept"})
    assert report.totals["num_micro_batches"] == 2


# ---- Trainer, callback, plugin -------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["trainer", "callback"])
@pytest.mark.parametrize("outcome", ["finished", "failed: ValueError", "interrupted"])
@pytest.mark.sampled(every=1000)
def test_a_training_leaves_its_report(how: str, outcome: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    config = replace(EVERYTHING, report=str(path))
    callbacks: list[TrainerCallback] = []
    if how == "callback":
        callbacks.append(PyAOCallback(config))
    error = ERRORS.get(outcome)
    if error is not None:
        callbacks.append(FailsAt(error))
    cls, more = (PyAOTrainer, {"pyao_config": config}) if how == "trainer" else (Trainer, {})
    trainer = trainer_for(cls, tiny_opt(), arguments(tmp_path), callbacks=callbacks, **more)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(type(error)):
            trainer.train()
        if how == "callback":  # Trainer tells it of no failure
            assert not path.exists()
            try:
                raise error
            except type(error):
                callbacks[0].detach()  # type: ignore[attr-defined]
    report = read(path)
    assert report.outcome == outcome
    assert report.extra == {"num_steps": 3 if error is None else 2}
    assert report.totals["offloaded_bytes"] > 0


@pytest.mark.thorough
def test_a_training_that_the_callback_was_not_told_the_end_of(tmp_path: Path) -> None:
    """The next training finds the model attached, and how the first one ended is unknown."""
    path = tmp_path / "r.json"
    callback = PyAOCallback(replace(EVERYTHING, report=str(path)))
    failing = FailsAt(ValueError("no"))
    callbacks = [callback, failing]
    trainer = trainer_for(Trainer, tiny_opt(), arguments(tmp_path), callbacks=callbacks)
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(read(path).outcome)

    trainer.remove_callback(failing)
    trainer.add_callback(Looks())
    trainer.train()
    assert set(seen) == {"unknown"}
    assert read(path).outcome == "finished"


# ---- lines ---------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hf_pyao")]


@pytest.mark.thorough
@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_trainer_says_at_start_and_at_end_what_it_does(
    disable_tqdm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, disable_tqdm=disable_tqdm)
    trainer_for(PyAOTrainer, tiny_opt(), args, pyao_config=EVERYTHING).train()
    start, end = lines_of(capsys.readouterr().out.replace("\r", "\n"))
    assert start.startswith("hf_pyao offloads saved tensors of 3 layers (model.decoder.layers.0 ..")
    assert end == (
        "hf_pyao moved 61.5 KiB of the 92.2 KiB that the layers saved for backward, per "
        "micro-batch (3 in all)."
    )


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["log_level", "logger"])
def test_a_trainer_that_is_to_be_quiet_is(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    try:
        args = arguments(tmp_path, **({"log_level": "error"} if how == "log_level" else {}))
        if how == "logger":
            logging.getLogger("hf_pyao").setLevel(logging.ERROR)  # undone by conftest
        trainer_for(PyAOTrainer, tiny_opt(), args, pyao_config=EVERYTHING).train()
    finally:
        transformers_logging.set_verbosity(before)
    assert lines_of(capsys.readouterr().out) == []


@pytest.mark.thorough
def test_lines_that_a_logger_shows_are_not_printed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_for(PyAOTrainer, tiny_opt(), arguments(tmp_path), pyao_config=EVERYTHING)
    with caplog.at_level(logging.INFO, "hf_pyao"):
        trainer.train()
    assert lines_of(capsys.readouterr().out) == []
    assert len(lines_of("\n".join(r.getMessage() for r in caplog.records))) == 2


def test_attach_prints_nothing_and_logs_both_lines(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    for level, num_lines in ((logging.WARNING, 0), (logging.INFO, 2)):
        caplog.clear()
        with caplog.at_level(level, "hf_pyao"), attach(model, EVERYTHING):
            step(model)
        assert len(caplog.records) == num_lines
    assert capsys.readouterr().out == ""
    assert "per micro-batch (1 in all)." in caplog.records[-1].getMessage()


# ---- the offloader in words ----------------------------------------------------------------------


def test_the_plugin_of_a_failed_loop_writes_at_detach(tmp_path: Path) -> None:
    from accelerate import Accelerator

    path = tmp_path / "r.json"
    plugin = PyAOPlugin(policy="all", min_bytes=0, host_memory_gib=0.1, report=str(path))
    accelerator = Accelerator(cpu=True)
    plugin.bind(accelerator)
    model = accelerator.prepare(tiny_model("llama"))
    with pytest.raises(ValueError, match="no"):
        try:
            accelerator.backward(model(**tiny_batch()).loss)
            raise ValueError("no")
        finally:
            plugin.detach()
    assert read(path).outcome == "failed: ValueError"
