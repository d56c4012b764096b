"""PyAO Figure 6: the time until 256 micro-batches are accumulated, on five nodes over 1 Gbit/s."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.catalogue import FIGURE_6
from experiments.runner import run_experiment

if __name__ == "__main__":
    run_experiment(FIGURE_6)
