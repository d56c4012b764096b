"""The command line: what it lists, what it prints, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import __version__, cli
from hf_pyao.plan.documents.bench import FactsReport
from hf_pyao.plan.documents.schema import write_json
from hf_pyao.settings.removed import REMOVED_OPTIONS, Removed
from hf_pyao.tools.bench import doctor
from hf_pyao.tools.bench.doctor import Machine
from hf_pyao.tools.estimate import plan_command
from hf_pyao.tools.report.kinds import read_document
from tests.helpers.documents import make_bench, make_run

COMMANDS = [
    *("bench", "estimate", "profile", "advise", "plan", "sweep"),
    *("report", "doctor"),
]


def _help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_exactly_the_commands_that_exist_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _help(capsys).split("COMMAND\n")[-1].splitlines()
    # What is said of a long name stands in a line of its own, further in.
    assert [line.split()[0] for line in listed if line[4:5].strip()] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, command)
    assert text.startswith(f"usage: pyao {command}")
    assert len(text.splitlines()) > 8


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hf_pyao {__version__}\n"


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plans"])
    assert ended.value.code == 2
    assert "usage: pyao" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "run_from_arguments", interrupted)
    assert cli.main(["plan", "opt:tiny"]) == 130
    assert capsys.readouterr() == ("", "pyao: interrupted\n")


# ---- report --------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A benchmark and a run, as files."""
    paths = [tmp_path / "bench.json", tmp_path / "run.json"]
    for path, document in zip(paths, (make_bench(), make_run()), strict=True):
        write_json(path, document)
    return [str(path) for path in paths]


def test_report_prints_tables(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", *files]) == 0
    out = capsys.readouterr().out
    assert "## opt 1.3b" in out
    assert "## Offloading in run.json: policy all, codec identity, on cuda:0" in out


def test_a_file_of_another_version_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"kind": "bench", "schema_version": 0}))
    assert cli.main(["report", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pyao: ")
    assert "old.json' has schema_version 0" in err
    assert len(err.splitlines()) == 1


# ---- doctor --------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without a device; returns the devices that were asked for."""
    asked: list[str] = []

    def look(device: str, disk: str | None) -> Machine:
        asked.append(device)
        return Machine(
            device={"name": "CPU", "memory_gib": None},
            link={},
            has_mps=False,
            device_node=None,
            device_cores=frozenset(),
            own_cores=frozenset({0}),
            locked_bytes=None,
            available_bytes=2**34,
        )

    monkeypatch.setattr(doctor, "look", look)
    return asked


def test_doctor_tells_findings_and_advice(
    machine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "none: CPU only" in out
    assert "- Without an accelerator" in out
    assert machine == ["cpu"]


def test_doctor_s_json_is_a_document(
    machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    (tmp_path / "doctor.json").write_text(capsys.readouterr().out)
    document = read_document(tmp_path / "doctor.json")
    assert isinstance(document, FactsReport)
    assert document.facts["device"] == "none: CPU only"


# ---- bench ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no --model is given"),
        (["--model", "mamba:tiny"], "no sizes of 'mamba' are known by name here"),
        (["--smoke", "--methods", "nome"], "unknown method 'nome'; did you mean 'none'?"),
        (["--steps", "0"], "--steps is 0; expected 1 or more"),
        (["--warmup", "-1"], "--warmup is -1; expected 0 or more"),
        (["--sequence-length", "1"], "--sequence-length is 1; expected 2 or more"),
        (["--micro-batch", "0"], "--micro-batch is 0; expected 1 or more"),
        (["--ballast-gib", "-1"], "--ballast-gib is -1.0; expected 0 or more"),
        (["--memory-cap-gib", "0"], "--memory-cap-gib is 0; expected more than 0"),
        (["--timeout", "-5"], "--timeout is -5; expected more than 0 seconds"),
        (["--timeout", "inf"], "--timeout is inf; expected more than 0 seconds, and at most"),
        (["--smoke", "--micro-batch", "-3"], "--micro-batch is -3; expected 1 or more"),
        (
            ["--smoke", "--micro-batch", "8", "--steps", "3"],
            "--smoke has shapes and steps of its own, and --micro-batch, --steps would change",
        ),
        (["--smoke", "--device", "warp"], "device is 'warp'; expected auto"),
    ],
)
def test_bench_refuses_in_one_line(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hf_pyao.tools.bench import harness
    from hf_pyao.tools.bench.memory import pick_device

    def probe(device: str, **options: Any) -> Any:
        pick_device(device)
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(harness, "probe", probe)
    if argv and "--smoke" not in argv and "--model" not in argv:
        argv = ["--model", "llama:hidden_size=8", *argv]
    assert cli.main(["bench", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_alone_it_says_what_each_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  pyao {command} " in printed for command in COMMANDS)
    assert "--help" in printed


def test_a_card_is_given_as_a_device_or_as_a_gpu() -> None:
    parser = cli.make_parser()
    for command in (["estimate", "--model", "opt:tiny"], ["plan", "opt:tiny"]):
        assert parser.parse_args([*command, "--gpu", "l4"]).device == "l4"


@pytest.mark.parametrize("gone", REMOVED_OPTIONS, ids=lambda gone: gone.setting)
def test_an_option_of_earlier_versions_is_refused_with_what_to_do_instead(
    gone: Removed, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *words = gone.setting.split()
    assert cli.main([*words, "--micro-batch", "3"]) == 2
    assert f"was removed in version {gone.version}. {gone.instead}" in capsys.readouterr().err


def test_a_board_is_not_shown_but_the_recipe_that_shows_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    path.write_text('{"kind": "board", "rows": []}')
    assert cli.main(["report", str(path)]) == 2
    assert "python recipes/bench/board.py --show" in capsys.readouterr().err
