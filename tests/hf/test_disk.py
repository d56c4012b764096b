"""A Trainer that offloads to a disk: what it writes, and that too much is refused beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.engine.stores.disk_figures import TB
from hf_pyao.errors import ConfigError
from hf_pyao.hf.disk_writes import predicted_disk_bytes
from tests.helpers import assert_same_tensors
from tests.hf.micro_batch.test_auto_micro_batch import trainer_of
from tests.hf.test_trainer import EVERYTHING

ON_DISK = replace(EVERYTHING, policy="all", host_memory_gib=0.0)


def on_disk(folder: Path, **more: Any) -> PyAOConfig:
    return replace(ON_DISK, **{"disk_path": folder / "disk", "disk_gib": 0.125, **more})


def trained(folder: Path, config: PyAOConfig | None) -> Any:
    trainer = trainer_of(folder, config, max_steps=3)
    trainer.train()
    return trainer


def test_a_trainer_with_a_disk_trains_the_same_and_writes_what_was_predicted(
    tmp_path: Path,
) -> None:
    plain = trained(tmp_path / "plain", None)
    config = on_disk(tmp_path, disk_write_limit=1)
    trainer = trained(tmp_path / "disk run", config)
    assert_same_tensors(
        dict(trainer.model.named_parameters()), dict(plain.model.named_parameters()), "weights"
    )
    moved = trainer.offload_metrics
    predicted_bytes = predicted_disk_bytes(trainer, config)
    assert predicted_bytes is not None
    assert predicted_bytes * moved["num_micro_batches"] == moved["offloaded_bytes"]
    padding_bytes = 4096 * moved["num_slots"] * moved["num_micro_batches"]
    assert moved["disk_written_bytes"] <= moved["offloaded_bytes"] + padding_bytes


def test_a_run_that_would_write_too_much_is_refused(tmp_path: Path) -> None:
    config = on_disk(tmp_path, disk_write_limit=1e6 / TB)
    trainer = trainer_of(tmp_path, config, max_steps=10**6)
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    with pytest.raises(ConfigError, match="1,000,000 steps would write about .* TB of saved") as it:
        trainer.train()
    assert "more than disk_write_limit=1e-06 TB. Segments of k layers (checkpoint_every=k)" in str(
        it.value
    )
    assert_same_tensors(dict(trainer.model.named_parameters()), before, "weights")
    assert trainer.state.global_step == 0


def test_it_is_not_predicted_where_it_is_not_known(tmp_path: Path) -> None:
    given: tuple[dict[str, Any], ...] = ({"policy": "auto"}, {"disk_gib": 0})
    for more in given:
        config = on_disk(tmp_path, **more)
        assert predicted_disk_bytes(trainer_of(tmp_path, config), config) is None
    assert predicted_disk_bytes(trainer_of(tmp_path, ON_DISK), ON_DISK) is None
