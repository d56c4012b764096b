"""MLPs in tiles on two ranks: the same gradients, exchanged once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import needs_deepspeed, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

WORKER = "tests.distributed.tiles_worker"


CASES = [
    ("ddp", "opt"),
    ("ddp", "llama"),
    ("fsdp2", "llama"),
    ("fsdp2", "opt"),
    ("fsdp2", "gpt2"),
    ("fsdp2_bf16", "llama"),
    ("fsdp1", "opt"),
    pytest.param("zero2", "llama", marks=needs_deepspeed),
    pytest.param("zero2", "opt", marks=needs_deepspeed),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_gradients_and_hooks(kind: str, name: str, tmp_path: Path) -> None:
    for rank in run_ranks(WORKER, tmp_path, kind, name):
        for when, facts in rank.items():
            bound = 2e-2 if kind.endswith("bf16") else 2e-6
            assert facts["same_names"]
            assert facts["worst"] <= bound, (when, facts)
            assert facts["tiled"]["losses"] == pytest.approx(facts["plain"]["losses"], rel=1e-5)
            assert facts["tiled"]["counts"] == facts["plain"]["counts"]
            if kind != "fsdp1":
                assert facts["tiled"]["metrics"]["mlp_tiles_num_tiles"] == 3, facts["tiled"]


def test_linears_that_are_sharded_by_themselves_are_left_alone(tmp_path: Path) -> None:
    for rank in run_ranks(WORKER, tmp_path, "fsdp2_linears", "llama"):
        for facts in rank.values():
            has_norms = facts["tiled"]["metrics"]["mlp_tiles_num_norms_tiled"] > 0
            assert facts["worst"] <= (2e-6 if has_norms else 0.0)
            assert facts["tiled"]["metrics"]["mlp_tiles_num_tiles"] == 0
            assert "sharded by itself" in facts["tiled"]["described"]


@needs_deepspeed
def test_zero_3_runs_layers_again_and_leaves_mlps_whole(tmp_path: Path) -> None:
    """It gathers weights for each call of each module; bit for bit the same but for tiled norms."""
    for rank in run_ranks(WORKER, tmp_path, "zero3", "llama"):
        for when, facts in rank.items():
            assert facts["same_names"]
            assert facts["worst"] <= 2e-6, (when, facts)
            assert facts["tiled"]["losses"] == pytest.approx(facts["plain"]["losses"], rel=1e-5)
            assert facts["tiled"]["metrics"]["mlp_tiles_num_tiles"] == 0
