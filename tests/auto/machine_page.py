"""Writes ``MACHINE.md``, the machine's table as a page: ``python -m tests.auto.machine_page``."""

from __future__ import annotations

import re
from pathlib import Path

from hf_pyao.auto.machine import table
from hf_pyao.auto.machine.states import Mode, Source, Target
from hf_pyao.auto.machine.table import TABLE

PAGE = Path(table.__file__).with_name("MACHINE.md")

_HEAD = """\
# The machine that decides which policy a model follows

Written by `python -m tests.auto.machine_page` from the table in `table.py`; do not edit.

`auto`, PyAO's rule and the ladder after an out-of-memory error are modes of one machine. It is told
events, and answers with actions; `driver.py` performs them and is the only caller of `engine.use`.
Modes, and all that is known about a set of trained parameters, are one frozen value
(`states.SetState`); where other parameters are trained, their value takes its place. A run logs its
transitions at the debug level (logger `hf_pyao.auto.machine.driver`), and its report has them as
`transitions`.

Before each forward, events come in this order: `Profiled` (who measures hears of a forward
first: `Place` in `auto/recording/forward_watch.py`), `Interrupted`, `Trained`, `Heard`, `Forward`,
`Timed`, `Refused`.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD, _modes(), _diagram(), *(_mode(mode) for mode in TABLE), _enums()]
    return "\n".join(parts)


def _modes() -> str:
    rows = "".join(f"| `{mode.name}` | {mode.value} |\n" for mode in Mode)
    return f"| mode | what decides |\n|---|---|\n{rows}"


def _diagram() -> str:
    edges: dict[tuple[Mode, Mode], list[str]] = {}
    for mode, rules in TABLE.items():
        for event, rule in rules.items():
            for to in rule.to:
                if to is not mode and to not in (Mode.DETACHED, Mode.TIGHTENED):
                    edges.setdefault((mode, to), []).append(_words_of(event))
    lines = [f"    {a.name} --> {b.name}: {', '.join(names)}" for (a, b), names in edges.items()]
    text = "\n".join(lines)
    return (
        f"```mermaid\nstateDiagram-v2\n    [*] --> OFF\n{text}\n```\n\n"
        "Arrows to `DETACHED` (from every mode, on `Detached`) and to `TIGHTENED` (when memory "
        "runs out, or a second run went wrong) are left out.\n"
    )


def _mode(mode: Mode) -> str:
    rows = "".join(
        f"| {_words_of(event)} | {rule.words} | "
        f"{', '.join(f'`{to.name}`' for to in rule.to if to is not mode) or 'stays'} |\n"
        for event, rule in TABLE[mode].items()
    )
    table = (
        f"| event | what is done | may lead to |\n|---|---|---|\n{rows}" if rows else "Nothing.\n"
    )
    return f"## {mode.name}\n\n{mode.value}\n\n{table}"


def _enums() -> str:
    sources = "".join(f"| `{each.name}` | {each.value} |\n" for each in Source)
    targets = "".join(f"| `{each.name}` | {each.value} |\n" for each in Target)
    return (
        f"## Where a plan comes from\n\n| source | |\n|---|---|\n{sources}\n"
        f"## Policies that can be in use\n\n| target | |\n|---|---|\n{targets}"
    )


def _words_of(event: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", event.__name__).lower()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
