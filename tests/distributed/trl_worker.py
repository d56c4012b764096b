"""One of two ranks that TRL's trainers train on, under DistributedDataParallel, with policy auto.

Called as ``python -m tests.distributed.trl_worker FOLDER CASE...``, each case a trainer's name, and
``lora`` behind a colon if adapters are trained.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import ends_at_once, join_group, slots_of, write_result
from tests.hf.test_trl_trainers import AUTO, assert_same_parameters, check_plan, trained_both_ways

TIMEOUT_S = 900
"""Plans are made on the first rank, and the others wait: on a machine that does much else, long."""


def train(case: str, folder: Path) -> dict[str, Any]:
    """Train *case* with hf_pyao and without, on this rank; check that the bits are the same."""
    name, _, tuning = case.partition(":")
    is_lora = tuning == "lora"
    # With adapters no layer runs again as a whole: plans offload then.
    config = dataclasses.replace(AUTO, checkpoint_every=0) if is_lora else AUTO
    found, expected, start = trained_both_ways(
        name, folder / str(dist.get_rank()), is_lora=is_lora, config=config, base=folder / "base"
    )
    for trainer in (found, expected):
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert trainer.accelerator.num_processes == dist.get_world_size() == 2
    assert_same_parameters(found, expected, start)
    check_plan(name, found, expected)
    return {
        "held": found.held_bytes[-1] / expected.held_bytes[-1],
        "sums": [float(p.double().sum()) for p in found.model.parameters()],
        "losses": [entry["loss"] for entry in found.state.log_history if "loss" in entry],
        "plan": [slots_of(plan) for plan in found.plans],
    }


def main(folder: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    join_group(folder, timeout_s=TIMEOUT_S)
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case] = train(case, folder / case.replace(":", "_"))
        except Exception:
            results[case] = {"error": traceback.format_exc()}
            break  # the ranks may be apart
    write_result(folder, results)


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), sys.argv[2:])
