"""Writes README.md beside this script from the result files: no number on it is typed.

python recipes/experiments/write_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import Experiment
from experiments.introduction import introduction
from experiments.page import table
from experiments.rows import MODES, REAL, read_document, result_path

PAGE = Path(__file__).with_name("README.md")


def page() -> str:
    """Return the page."""
    parts = [introduction(), "## Which modes each has", _modes()]
    for experiment in EXPERIMENTS:
        parts.append(experiment.section(lambda mode, of=experiment: _read(of, mode)))  # type: ignore[misc]
        parts += _images(experiment)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _modes() -> str:
    """Return the table of experiments and modes, with what was run and why some have none."""
    rows = []
    for experiment in EXPERIMENTS:
        cells = [f"`{experiment.name}`"]
        for mode in MODES:
            path = result_path(experiment.name, mode)
            run = experiment.modes[mode]
            if isinstance(run, str):
                cells.append(f"none: {run}")
            elif path.exists():
                cells.append(f"[result](../results/experiments/{path.name})")
            else:
                cells.append("not run: needs an accelerator" if mode == REAL else "not run")
        rows.append(cells)
    return table(["experiment", *(f"`--{mode}`" for mode in MODES)], rows)


def _read(experiment: Experiment, mode: str) -> dict[str, Any] | None:
    path = result_path(experiment.name, mode)
    return read_document(path) if path.exists() else None


def _images(experiment: Experiment) -> list[str]:
    found = []
    for mode in ("predict", "miniature", "real"):
        image = result_path(experiment.name, mode).with_suffix(".png")
        if image.exists():
            path = f"../results/experiments/{image.name}"
            found.append(f"![{experiment.title}, {mode}]({path})")
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
