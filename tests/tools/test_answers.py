"""Answers that are kept: the same question is answered from a file, any other is computed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_pyao.plan.documents.microbatch import MicroBatchReport
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.tools import answers


def report(title: str) -> MicroBatchReport:
    return MicroBatchReport(
        title=title,
        find="fastest",
        global_batch=4,
        limit_bytes=10,
        chosen=None,
        verdict="",
        setup={"model": {"name": "made up"}},
        hardware={"name": "made up"},
        assumptions=[],
        provenance=collect_provenance(),
        rows=[],
    )


class Asking:
    """Asks, and counts what is computed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.num_computed = 0
        monkeypatch.setattr(answers, "answers_folder", lambda: folder)

    def __call__(self, model: str = "opt:tiny", **options: Any) -> MicroBatchReport:
        args = argparse.Namespace(**{"no_cache": False, "json": False, "lora": None, **options})
        return answers.answered(args, model, MicroBatchReport, self._compute, tells=True)

    def _compute(self) -> MicroBatchReport:
        self.num_computed += 1
        return report(f"answer {self.num_computed}")

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*"))


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    return Asking(tmp_path / "a" / "b", monkeypatch)


def test_the_same_question_is_computed_once(
    ask: Asking, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ask(lora=8)
    assert capsys.readouterr().err == ""
    assert ask(lora=8) == first
    assert "--no-cache" in capsys.readouterr().err
    assert ask(lora=8, json=True) == first, "where it goes is no part of the question"
    assert ask.num_computed == 1


def test_another_question_is_computed(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    ask(lora=8)
    assert ask.num_computed == 2
    monkeypatch.setattr(answers, "_version_of", lambda package: f"{package} 0")
    ask()
    assert ask.num_computed == 3
    monkeypatch.setattr(answers, "source_digest", lambda: "edited")
    ask()
    assert ask.num_computed == 4


def test_a_folder_counts_by_its_configuration(ask: Asking, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    ask(str(model))
    assert ask.files == [], "a model without configuration has no question"
    (model / "config.json").write_text("{}")
    for num_computed in (2, 2):
        ask(str(model))
        assert ask.num_computed == num_computed
    (model / "config.json").write_text('{"hidden_size": 8}')
    ask(str(model))
    assert ask.num_computed == 3


def test_without_cache_nothing_is_read_or_kept(ask: Asking) -> None:
    ask(no_cache=True)
    assert not ask.folder.exists()
    ask()
    ask(no_cache=True)
    assert ask.num_computed == 3


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\0", '{"question": 1, "answer": {}}'])
def test_a_damaged_file_is_replaced(ask: Asking, content: str) -> None:
    first = ask()
    (path,) = ask.files
    path.write_text(content)
    second = ask()
    assert (ask.num_computed, second.title) == (2, "answer 2")
    assert ask() == second != first


def test_a_folder_that_cannot_be_written_is_no_error(ask: Asking) -> None:
    ask.folder.parent.mkdir()
    ask.folder.write_text("a file")
    ask()
    ask()
    assert ask.num_computed == 2


def test_what_was_used_last_is_kept(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_ANSWERS", 3)
    for rank in range(3):
        ask(lora=rank)
        for path in ask.files:  # the clock of the file system may be coarse
            os.utime(path, (path.stat().st_atime - 10, path.stat().st_mtime - 10))
    ask(lora=0)
    ask(lora=3)
    assert len(ask.files) == 3
    assert ask.num_computed == 4
    ask(lora=0)
    assert ask.num_computed == 4, "the one that was used again stays"
    ask(lora=1)
    assert ask.num_computed == 5


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/hf_pyao"),
        ("linux", {}, "/home/me/.cache/hf_pyao"),
        ("darwin", {}, "/home/me/Library/Caches/hf_pyao"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/hf_pyao"),
        ("win32", {}, None),
    ],
)
@pytest.mark.sampled(every=1)
def test_answers_are_in_the_users_cache_directory(
    platform: str,
    variables: dict[str, str],
    expected: str | None,
    answers_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert answers_folder() == (None if expected is None else Path(expected))


@pytest.fixture(scope="session")
def answers_folder() -> Any:
    """The function itself, which other tests do without."""
    return answers.answers_folder


@pytest.mark.thorough
def test_a_kept_answer_is_given_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from hf_pyao.cli import main; code = main(sys.argv[1:]);"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "estimate", "--model", "opt:micro", "--find"]
    command += ["micro-batch", "--global-batch", "2", "--sequence-length", "64"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert done[0].stdout == done[1].stdout
    assert [each.stderr.splitlines()[-1] for each in done] == ["0 True", "0 False"]
