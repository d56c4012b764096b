"""Policy ``auto`` with a disk below the host: the same gradients, at the speeds that it measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights_on_disk
from hf_pyao.auto.offloader import Offloader
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.errors import DiskError
from hf_pyao.plan.predict.disk_demand import DiskDemand
from hf_pyao.plan.solve.planner import Planner
from tests.helpers import assert_same_tensors, gradients_of, tiny_batch, tiny_model
from tests.helpers.adapters import tiny_lora
from tests.helpers.disks import on_disk, take_any_file_system


@pytest.mark.filterwarnings("ignore")
def test_auto_trains_the_same_and_knows_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = DiskStore.__init__

    def small(self: DiskStore, *args: object, **kwargs: object) -> None:
        init(self, *args, **{**kwargs, "memory_bytes": 2**14})  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "__init__", small)
    model = tiny_model("gpt2")
    plain = copy.deepcopy(model)
    config = PyAOConfig(
        policy="auto",
        profile_steps=2,
        min_bytes=0,
        window=4096,
        device_memory_gib=2**-11,
        host_memory_gib=0.0,
        disk_path=tmp_path,
        disk_gib=0.125,
    )
    with attach(model, config) as offloader:
        for seed in range(8):
            for each in (model, plain):
                each(**tiny_batch(seed)).loss.backward()
        _, store = offloader.link.tiers.stores
        assert isinstance(store, DiskStore)
        write, read = store.speeds() or (0.0, 0.0)
        assert write > 0
        assert read > 0
        assert offloader.totals()["disk_written_bytes"] > 0
        assert offloader.auto is not None
        assert offloader.auto.plan is not None, offloader.describe()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


def micro_batches(model: nn.Module, plain: nn.Module, seeds: range) -> None:
    for seed in seeds:
        for each in (model, plain):
            each(**tiny_batch(seed)).loss.backward()
    assert_same_tensors(gradients_of(model), gradients_of(plain), "gradients")


def on_disk_of(offloader: Offloader) -> list[str]:
    """Return the names of the layers that lie on the disk."""
    assert offloader.weights is not None
    masters = [block.masters for block in offloader.weights.blocks]
    return [each.layer for each in masters if each.in_file is not None]


@pytest.mark.filterwarnings("ignore")
def test_plans_know_what_a_run_reads_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_any_file_system(monkeypatch)
    seen: list[Planner] = []
    best = Planner.best

    def noted(planner: Planner, limit_bytes: float) -> Any:
        seen.append(planner)
        return best(planner, limit_bytes)

    monkeypatch.setattr(Planner, "best", noted)
    model = tiny_lora("llama", num_hidden_layers=5)
    plain = copy.deepcopy(model)
    settings = on_disk(model, tmp_path, stream_weights=1, share=0.75)
    config = PyAOConfig(**settings, policy="auto", profile_steps=2, device_memory_gib=2**-10)
    with attach(model, config) as offloader:
        micro_batches(model, plain, range(8))
        names = on_disk_of(offloader)
        assert offloader.weights is not None
        counts = offloader.weights.figures()
    assert names
    planned = [planner for planner in seen if planner.program.streamed]
    assert planned
    for planner in planned:
        streamed, disk = planner.program.streamed, planner.conditions.link.disk
        assert [name.rpartition(".")[2] for name in names] == list(map(str, streamed.disk_layers))
        assert streamed.staging_bytes >= counts["staging_bytes"]
        assert disk is not None
        assert not disk.takes_saved
        # All blocks are read in each pass, but for those of the turns.
        read_bytes = DiskDemand.of(planner.program, 0, disk).weights_bytes
        assert all(0 < nbytes <= streamed.disk_bytes for nbytes in read_bytes.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [False, True])
def test_layers_that_leave_later_go_to_the_disk(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_any_file_system(monkeypatch)
    model = tiny_lora("llama", num_hidden_layers=8)
    plain = copy.deepcopy(model)
    config = PyAOConfig(**on_disk(model, tmp_path, stream_weights=5, share=0.9), policy="off")
    with attach(model, config) as offloader:
        weights = offloader.weights
        assert weights is not None
        micro_batches(model, plain, range(2))
        assert not on_disk_of(offloader)
        if fails:

            def full(*args: object) -> None:
                raise DiskError("the disk is full", key="disk")

            monkeypatch.setattr(weights_on_disk, "file_of_blocks", full)
        weights.ask_for(0)
        micro_batches(model, plain, range(2, 4))
        assert bool(on_disk_of(offloader)) is not fails
        assert (weights.num_resident == 0) is not fails
        assert (weights.memory.disk.placed is None) is fails
        weights.ask_for(4)  # those on the disk keep their places, and so do the others
        micro_batches(model, plain, range(4, 6))
        if not fails:
            assert weights.num_resident == 0
            assert weights.figures()["disk_read_bytes"] > 0


def test_auto_says_that_layers_keep_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_any_file_system(monkeypatch)
    model = tiny_lora("llama", num_hidden_layers=8)
    plain = copy.deepcopy(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    settings = on_disk(model, tmp_path, stream_weights="auto", share=0.4, stream_embeddings="off")
    config = PyAOConfig(**settings, policy="all", device_memory_gib=1.2 * nbytes / 2**30)
    with attach(model, config) as offloader:
        assert "weights-keep-places" in caplog.text
        assert offloader.weights is not None
        num_resident = offloader.weights.num_resident
        assert num_resident > 0
        micro_batches(model, plain, range(3))
        assert offloader.weights.num_resident == num_resident
