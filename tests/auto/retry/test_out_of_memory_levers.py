"""Out of memory where layers run again and MLPs run in tiles: in forward, in what runs again, and
in backward."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from tests.auto.retry import test_out_of_memory_loops as loops
from tests.auto.retry.test_out_of_memory import OFF, check_points
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    assert_same_tensors,
)
from tests.helpers.memory_faults import MemoryFaults, sample

CASES: dict[str, tuple[str, PyAOConfig]] = {
    "each layer again": ("gpt2", replace(EVERYTHING, checkpoint_every=1)),
    "two layers again": ("llama", replace(EVERY_LAYER, checkpoint_every=2)),
    "nested": ("llama", replace(EVERY_LAYER, checkpoint_every=2, checkpoint_nested=True)),
    "again, and kept": ("opt", replace(OFF, checkpoint_every=2)),
    "tiles": ("llama", replace(EVERYTHING, mlp_tiles=2)),
    "tiles in segments": ("llama", replace(EVERY_LAYER, checkpoint_every=2, mlp_tiles=2)),
    "long context": ("llama", replace(EVERY_LAYER, long_context=True, mlp_tiles=2)),
    "auto": ("llama", PyAOConfig(min_bytes=0, long_context=True, mlp_tiles=2, checkpoint_every=2)),
}


@pytest.fixture(autouse=True)
def _few_objects(small_heap: None) -> None:
    gc.collect()


def test_a_run_completes_with_the_same_bits() -> None:
    check_points("two layers again", 2, CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_run_completes_with_the_same_bits_at_any_allocation(name: str) -> None:
    check_points(name, 60, CASES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [{"checkpoint_every": 2}, {"checkpoint_every": 1, "mlp_tiles": 2}]
)
def test_a_trainer_completes_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = replace(EVERY_LAYER, **settings)
    counted = MemoryFaults()
    expected = loops.outcome(loops.run_trainer(tmp_path, counted, config=config))
    for at in sample(len(counted.allocations), 20):
        faults = MemoryFaults({at}, counted.allocations)
        trainer = loops.run_trainer(tmp_path, faults, config=config)
        assert faults.num_raised == 1
        assert_same_tensors(loops.outcome(trainer), expected, f"allocation {at}")
        assert trainer.pyao_offloader is None
