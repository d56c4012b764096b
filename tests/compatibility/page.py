"""Trains every case, and writes hf_pyao/COMPATIBILITY.md and its result file.

python -m tests.compatibility.page          # train, then write both
python -m tests.compatibility.page --only   # write the page from the result file
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import to_plain
from tests.compatibility.cases import (
    GOES_ON,
    ON_ONE_PROCESS,
    ON_TWO_RANKS,
    REFUSED,
    SETTINGS,
    Outcome,
    run,
)
from tests.compatibility.worker import WORLD_SIZE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "hf_pyao" / "COMPATIBILITY.md"
RESULTS = ROOT / "recipes" / "results" / "compatibility.json"
TIMEOUT_S = 900
VERSIONS = ("torch", "transformers", "accelerate", "python")

HEAD = """\
# What works with what, as it ran

For those who want to know, before they switch a setting on, what becomes of it under the engine that
trains their model. Each cell is a run of a tiny Llama on a CPU: {num_steps} steps with hf_pyao, and as many
without. Where a codec or another order of sums does not round, loss and gradients of the last step
have the same bits; a case that differs fails, and is not written here. DDP and FSDP ran on two ranks
(gloo). Compiled code ran by the backend `{backend}`.

`{command}` writes this page and its
[result file](../recipes/results/compatibility.json). Versions: {versions}.

- **works**: the setting did what it says.
- *goes on*: training goes on without it, or with less of it. The notes have the lines of the log.
- refused: an error says so before the first step.

DeepSpeed, tensor parallelism, pipelines and device maps have no runs here;
[LIMITS.md](LIMITS.md#engines) says what is known of them.
"""


def render(document: dict[str, Any]) -> str:
    """Return the page for a result file."""
    from tests.compatibility.cases import BACKEND, NUM_STEPS

    versions = document["provenance"]["versions"]
    outcomes = {(o["engine"], o["setting"]): Outcome(**o) for o in document["outcomes"]}
    engines = list(dict.fromkeys(engine for engine, _ in outcomes))
    settings = list(dict.fromkeys(setting for _, setting in outcomes))
    notes: list[str] = []
    policies = [name for name in settings if set(SETTINGS[name].fields) <= _OF_POLICIES]
    levers = [name for name in settings if name not in policies]
    parts = [
        HEAD.format(
            num_steps=NUM_STEPS,
            backend=BACKEND,
            command="python -m tests.compatibility.page",
            versions=", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions),
        ),
        "## Policies\n",
        _table(engines, policies, outcomes, notes),
        "## Settings, with policy `all`\n",
        _table(engines, levers, outcomes, notes),
        "## Notes\n",
        "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)) + "\n",
    ]
    return "\n".join(parts)


_OF_POLICIES = {"policy", "modules", "budget", "device_memory_gib"}


def _table(
    engines: list[str],
    settings: list[str],
    outcomes: dict[tuple[str, str], Outcome],
    notes: list[str],
) -> str:
    rows = [["engine", *settings], ["---"] * (len(settings) + 1)]
    for engine in engines:
        cells = [_cell(outcomes[engine, setting], notes) for setting in settings]
        rows.append([engine, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _cell(outcome: Outcome, notes: list[str]) -> str:
    if outcome.answer not in (GOES_ON, REFUSED):
        return f"**{outcome.answer}**"
    text = f"*{outcome.answer}*" if outcome.answer == GOES_ON else outcome.answer
    if not outcome.message:
        return text
    if outcome.message not in notes:
        notes.append(outcome.message)
    return f"{text} ({notes.index(outcome.message) + 1})"


def train_on_one_process(engine: str) -> list[Outcome]:
    """Return what comes of every setting under one of :data:`ON_ONE_PROCESS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [run(engine, ON_ONE_PROCESS[engine], name) for name in SETTINGS]


def train_on_two_ranks() -> list[Outcome]:
    """Return what comes of every setting under :data:`ON_TWO_RANKS`, as rank 0 has it.

    Raises:
        AssertionError: a rank failed, or the ranks' answers differ.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.compatibility.worker"]
        ranks = [
            subprocess.Popen([*command, str(rank), name], cwd=ROOT) for rank in range(WORLD_SIZE)
        ]
        try:
            codes = [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        assert not any(codes), f"ranks ended with {codes}"
        found = [
            [Outcome(**each) for each in json.loads((folder / f"{rank}.json").read_text())]
            for rank in range(WORLD_SIZE)
        ]
    answers = [[outcome.answer for outcome in each] for each in found]
    assert answers[0] == answers[1], "ranks differ"
    assert len(found[0]) == len(ON_TWO_RANKS) * len(SETTINGS)
    return found[0]


def main(arguments: list[str]) -> None:
    """Train and write, or write alone."""
    if "--only" not in arguments:
        outcomes = [each for engine in ON_ONE_PROCESS for each in train_on_one_process(engine)]
        outcomes += train_on_two_ranks()
        document = {
            "schema_version": 1,
            "kind": "compatibility",
            "provenance": collect_provenance(),
            "outcomes": [outcome.to_dict() for outcome in outcomes],
        }
        RESULTS.write_text(json.dumps(to_plain(document), indent=1) + "\n", encoding="utf-8")
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(render(document), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
