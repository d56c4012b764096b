"""PyAO Figure 5 and Table 1; `--help` says what it is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.figures import FIGURE_5
from experiments.runner import run_experiment

if __name__ == "__main__":
    run_experiment(FIGURE_5)
