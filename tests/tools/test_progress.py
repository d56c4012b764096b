"""How far a command has come, in a file."""

from __future__ import annotations

import pytest

from hf_pyao.tools import progress
from hf_pyao.tools.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_line_now_and_then_says_what_is_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("estimating", 8, "ways", is_shown=True) as shown:
        for name in ("a", "b", "c", "d"):
            clock[0] += 3
            shown.done(name)
    assert capsys.readouterr().err.splitlines() == [
        "estimating: 2 of 8 ways after 6 s (b); about 18 s more if the rest takes as long each",
        "estimating: 4 of 8 ways after 12 s (d); about 12 s more if the rest takes as long each",
    ]


def test_what_is_quick_or_hidden_says_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("estimating", 2, "ways", is_shown=True) as shown:
        shown.done("a")
    with Progress("estimating", 2, "ways", is_shown=False) as hidden:
        clock[0] += 60
        hidden.done("a")
    assert capsys.readouterr() == ("", "")
