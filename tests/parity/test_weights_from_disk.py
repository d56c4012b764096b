"""Training with frozen weights on a disk equals plain training, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.engine.weights import expert_groups
from tests.helpers import ACCUMULATING, assert_same_trajectory, train
from tests.helpers.adapters import cast_base_, tiny_lora
from tests.helpers.disks import on_disk, take_any_file_system

STEPS = (*ACCUMULATING, *ACCUMULATING[:2])
ARCHITECTURES = ("llama", "gpt2", "opt", "qwen3")


@pytest.fixture(autouse=True)
def _any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_file_system(monkeypatch)


def check(model: nn.Module, folder: Path, what: str, autocast: Any = None, **settings: Any) -> None:
    if autocast is not None:
        cast_base_(model, autocast)
    ours = copy.deepcopy(model)
    expected = train(model, STEPS, autocast=autocast)
    with attach(ours, PyAOConfig(**on_disk(ours, folder, **settings))) as offloader:
        found = train(ours, STEPS, autocast=autocast)
        assert offloader.weights is not None
        counts = offloader.weights.figures()
    assert counts["disk_read_bytes"] > 0, what
    assert counts["num_disk_retries"] == 0, what
    assert_same_trajectory(found, expected, what)
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), f"{what}: {name}"


@pytest.mark.parametrize("model_type", ARCHITECTURES[:3])
def test_lora_streamed_from_disk(model_type: str, tmp_path: Path) -> None:
    check(tiny_lora(model_type, dropout=0.1), tmp_path, model_type, policy="all")


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_weights_and_saved_tensors_on_one_disk(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no room beside the weights goes to the disk, and comes back from there."""
    init = DiskStore.__init__

    def small(store: DiskStore, *args: Any, **kwargs: Any) -> None:
        init(store, *args, **{"memory_bytes": 2**14, **kwargs})  # else it forwards all of it

    monkeypatch.setattr(DiskStore, "__init__", small)
    model = tiny_lora(model_type, dropout=0.1)
    ours = copy.deepcopy(model)
    expected = train(model, STEPS)
    config = PyAOConfig(**on_disk(ours, tmp_path, policy="all", window=4096, disk_gib=0.125))
    with attach(ours, config) as offloader:
        assert offloader.weights is not None
        _, store = offloader.link.tiers.stores
        assert isinstance(store, DiskStore)
        found = train(ours, STEPS)
        assert offloader.weights.figures()["disk_read_bytes"]
        assert store.figures.written_bytes
        assert store.figures.read_bytes
    assert_same_trajectory(found, expected, model_type)
    left = [path.name.split("-")[0] for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["weights"], "only the base stays"


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.98, 0.5])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_each_architecture(model_type: str, autocast: Any, share: float, tmp_path: Path) -> None:
    model = tiny_lora(model_type, dropout=0.1, num_hidden_layers=5)
    check(model, tmp_path, model_type, autocast, policy="all", share=share)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "off"},
        {"policy": "all", "checkpoint_every": 2},
        {"policy": "all", "stream_weights": 1, "share": 0.75},
        {"policy": "all", "recompute_modules": ("pointwise",)},
        {"policy": "all", "stream_embeddings": "on", "share": 1.0},
    ],
    ids=str,
)
def test_beside_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_lora("llama", dropout=0.1, num_hidden_layers=5)
    check(model, tmp_path, str(settings), **settings)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_groups_of_experts(experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.integrations.moe", reason="fused experts: transformers 5")
    monkeypatch.setattr(expert_groups, "GROUP_BYTES", 1)
    adapters = {"target_modules": ["q_proj", "o_proj"]}
    model = tiny_lora("mixtral", adapters=adapters, experts_implementation=experts)
    check(model, tmp_path, experts, policy="all", share=0.9)
