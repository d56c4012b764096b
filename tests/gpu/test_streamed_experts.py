"""Experts that are streamed by group, on the device: the bits of a resident run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights
from tests.gpu.device import Device
from tests.helpers import ACCUMULATING, train
from tests.parity.test_streamed_experts import mixture

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"policy": "all"},
    "nothing offloaded": {"policy": "off"},
    "small window": {"policy": "all", "window": 2**16, "keep_last_layers": 0},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_loss_and_gradients_are_equal(
    gpu: Device, experts: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights, "largest_block_bytes", lambda layers: max(e.nbytes for e in layers) // 5
    )
    device = gpu.torch_device
    if device.type != "cuda":
        # transformers counts rows with integers, which not every stand-in of a device can. CUDA's
        # deterministic kernel counts nothing else.
        histc = torch.histc
        monkeypatch.setattr(torch, "histc", lambda x, **options: histc(x.float(), **options))
    model = mixture("qwen3_moe", experts, attention_dropout=0.0)
    plain = copy.deepcopy(model).to(device)
    batches = [
        [{name: value.to(device) for name, value in batch.items()} for batch in step]
        for step in ACCUMULATING
    ]
    expected = train(plain, batches)
    config = PyAOConfig(stream_weights=0, min_bytes=0, host_memory_gib=0.5, **SETTINGS[settings])
    with attach(model, config, transport=gpu.transport(), device=device) as offloader:
        found = train(model, batches)
        assert offloader.weights is not None
        ring = offloader.weights.ring
        assert ring is not None
        assert ring.num_uploads > 2 * ring.num_blocks
        assert ring.counts.num_left == 0
    gpu.finish()
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name].cpu(), value.cpu()), name
    for ours, theirs in zip(found.losses, expected.losses, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
