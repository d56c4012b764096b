"""ZO2's experiment on overlap; `--help` says what it is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.catalogue import ZEROTH_ORDER_OVERLAP
from experiments.runner import run_experiment

if __name__ == "__main__":
    run_experiment(ZEROTH_ORDER_OVERLAP)
