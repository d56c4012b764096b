"""Policy ``auto`` with a disk below the host: the same gradients, at the speeds that it measured."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores.disk_store import DiskStore
from tests.helpers import assert_same_tensors, gradients_of, tiny_batch, tiny_model


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
