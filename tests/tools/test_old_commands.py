"""Names that commands had: they say what the name is now, and do the same."""

from __future__ import annotations

import pytest

from hf_pyao import cli
from hf_pyao.tools.old_commands import renamed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("microbatch --model a", "estimate --model a --find micro-batch"),
        ("microbatch --find=largest --model a", "estimate --model a --find largest-micro-batch"),
        (
            "microbatch --model a --find sequence --json",
            "estimate --model a --json --find sequence",
        ),
        ("microbatch --model=a --lora 8", "estimate --model=a --lora 8 --find micro-batch"),
        ("predict a.json", "plan a.json --try"),
        ("predict a.json --plan b --link 1GiB/s --plan c", "plan a.json --link 1GiB/s --try b c"),
        ("predict a.json --output o.json --json", "plan a.json --json --save o.json --try"),
    ],
)
def test_old_names_are_translated(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert renamed(old.split()) == new.split()
    cli.make_parser().parse_args(renamed(new.split()))
    told = capsys.readouterr()
    assert told.err.count(f"`pyao {old.split()[0]}` is") == 1 and not told.out


@pytest.mark.parametrize("argv", [[], ["--help"], ["estimate", "--find", "sequence"]])
def test_other_names_stay(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert renamed(argv) == argv
    assert capsys.readouterr().err == ""


def test_an_old_name_runs_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["microbatch", "--model", "llama:micro", "--global-batch", "0"]) == 2
    err = capsys.readouterr().err
    assert "pyao estimate --find micro-batch" in err
    assert "--global-batch is 0; expected 1 or more" in err
