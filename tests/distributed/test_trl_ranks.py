"""TRL's trainers on two ranks under policy auto: the bits of the same ranks without hf_pyao."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="not run: TRL is not installed"
    ),
]

TRAINERS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.sampled(every=1000)
def test_final_parameters_are_those_without_us(tuning: str, tmp_path: Path) -> None:
    cases = [f"{name}:{tuning}" for name in TRAINERS]
    ranks = run_ranks("tests.distributed.trl_worker", tmp_path, *cases, timeout_s=1800)
    for case in cases:
        first, second = (rank[case] for rank in ranks)
        assert "error" not in first, first["error"]
        assert "error" not in second, second["error"]
        assert first["sums"] == second["sums"], "gradients were reduced"
        assert first["plan"] == second["plan"], "at each micro-batch both follow the same"
        assert first["losses"]
