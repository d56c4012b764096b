"""With a codec, fewer bytes cross the link, and what is brought back ahead takes less memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.engine.stores.slabs import ALIGNMENT_BYTES
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.plan.step.ledger import MemoryLedger
from studies.study_codecs import study_codec
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTicket, SimulatedTransport

NUM_LAYERS, NUM_SLOTS = 4, 16
ROWS, COLUMNS = 16, 256
SLOT_BYTES = ROWS * COLUMNS * 4
LAYER_BYTES = NUM_SLOTS * SLOT_BYTES

PAYLOAD_BYTES = {
    "identity": SLOT_BYTES,
    "int8": ROWS * COLUMNS + 4 * ROWS,
    "int8_group": ROWS * COLUMNS + 4 * ROWS * COLUMNS // 128,
    "fp8": ROWS * COLUMNS + 4 * ROWS,
    "int4": ROWS * COLUMNS // 2 + 4 * ROWS * COLUMNS // 64,
}
"""Codes, and a float32 scale for each row or group; multiples of 64 all, so without padding."""

COMPRESSING = [name for name in PAYLOAD_BYTES if name != "identity"]
LINK = LinkModel(d2h_gib_per_s=1.0, h2d_gib_per_s=1.0)


class _Slot(torch.autograd.Function):
    """Saves its result; the gradient depends on every value of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        result = x.sin()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        assert result.shape == (ROWS, COLUMNS)
        return gradient * (1 + result)


class CompressedLinkLayer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_SLOTS):
            x = _Slot.apply(x)
        return x


class CompressedLinkStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CompressedLinkLayer() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MeasuringTransport(SimulatedTransport):
    """Counts the bytes that cross, and those of reloaded buffers that live at once."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, link=LINK)
        self.num_bytes = {"offload": 0, "reload": 0}
        self.reloaded = MemoryLedger()

    def offload(self, src: torch.Tensor, dst: torch.Tensor, **how: Any) -> SimulatedTicket:
        assert src.numel() * src.element_size() == dst.numel() * dst.element_size()
        self.num_bytes["offload"] += src.numel() * src.element_size()
        return super().offload(src, dst, **how)

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **how: Any) -> SimulatedTicket:
        self.num_bytes["reload"] += dst.numel() * dst.element_size()
        self.reloaded.note([dst])
        return super().reload(src, dst, **how)


@dataclass(frozen=True)
class Outcome:
    """What one step did."""

    num_bytes: dict[str, int]
    metrics: dict[str, float]
    reload_peak_bytes: int
    device_peak_bytes: int
    gradient: torch.Tensor


def step(codec: str, *, window: str | int = "layer", seed: int = 0) -> Outcome:
    """Run one forward and backward on the simulated accelerator, all layers offloaded."""
    register_module_map("CompressedLinkStack", ModuleMap(layers=("layers",)))
    transport = MeasuringTransport(seed)
    assert transport.link is not None
    stack = CompressedLinkStack().train()
    config = PyAOConfig(
        policy="all",
        codec=study_codec(codec),
        min_bytes=0,
        keep_last_layers=0,
        window=window,
        host_memory_gib=0.1,
    )
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    with attach(stack, config, transport=transport) as offloader:
        speeds = DeviceModel(tflop_per_s=1e6, memory_gib_per_s=1e6, launch_us=0.0)
        device = SimulatedDevice(speeds, transport.link, offloader.host_pool)
        with device:
            y = stack(x)
            y.sum().backward()
        del y
        metrics = offloader.metrics()
        assert not transport.violations
    assert x.grad is not None
    return Outcome(
        transport.num_bytes,
        metrics,
        transport.reloaded.peak_bytes,
        device.ledger.peak_bytes,
        x.grad,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("codec", PAYLOAD_BYTES)
def test_exactly_the_encoded_bytes_cross_each_way(codec: str) -> None:
    outcome = step(codec)
    each_way = NUM_LAYERS * NUM_SLOTS * PAYLOAD_BYTES[codec]
    assert outcome.num_bytes == {"offload": each_way, "reload": each_way}
    metrics = outcome.metrics
    assert metrics["link_bytes"] == 2 * each_way
    # What is spared on the device is counted before the codec, whatever it is.
    assert metrics["offloaded_bytes"] == metrics["reloaded_bytes"] == NUM_LAYERS * LAYER_BYTES
    assert metrics["would_hold_bytes"] == NUM_LAYERS * LAYER_BYTES


@pytest.mark.parametrize("codec", PAYLOAD_BYTES)
def test_what_is_brought_back_ahead_takes_its_encoded_size(codec: str) -> None:
    """One layer ahead by the paper's rule: at most two layers' payloads are there at once."""
    outcome = step(codec)
    in_two_layers = 2 * NUM_SLOTS * PAYLOAD_BYTES[codec]
    assert in_two_layers // 2 <= outcome.reload_peak_bytes <= in_two_layers


@pytest.mark.thorough
@pytest.mark.parametrize("codec", COMPRESSING)
def test_device_and_host_peaks_shrink(codec: str) -> None:
    plain, compressed = step("identity"), step(codec)
    # Not in proportion: in plain torch, encoding takes a few slots' memory for the moment.
    assert compressed.device_peak_bytes < plain.device_peak_bytes * 0.45
    num_buffers = NUM_LAYERS * NUM_SLOTS
    assert plain.metrics["host_peak_bytes"] == num_buffers * SLOT_BYTES
    padded_bytes = -(-PAYLOAD_BYTES[codec] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    assert compressed.metrics["host_peak_bytes"] == num_buffers * padded_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.sampled(every=1000)
def test_prefetch_by_bytes_reaches_further_in_the_same_memory(codec: str) -> None:
    """A window in bytes counts payloads: more of them fit, and no more memory is taken."""
    window = 2 * SLOT_BYTES
    plain, compressed = step("identity", window=window), step(codec, window=window)
    assert plain.reload_peak_bytes <= window + SLOT_BYTES
    assert compressed.reload_peak_bytes <= window + PAYLOAD_BYTES[codec]
    assert compressed.reload_peak_bytes // PAYLOAD_BYTES[codec] > (
        plain.reload_peak_bytes // SLOT_BYTES
    )


@pytest.mark.thorough
def test_gradients_are_those_of_values_encoded_and_decoded_once() -> None:
    for name in COMPRESSING:
        codec = study_codec(name)
        torch.manual_seed(0)
        x = torch.randn(ROWS, COLUMNS)
        results = []
        for _ in range(NUM_LAYERS * NUM_SLOTS):
            x = x.sin()
            results.append(x)
        expected = torch.ones(ROWS, COLUMNS)
        for result in reversed(results):
            encoded = codec.encode(result)
            expected = expected * (1 + codec.decode(encoded.payload, encoded.spec))
        assert torch.equal(step(name).gradient, expected), name
        assert not torch.equal(step("identity").gradient, expected), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seeds", [range(1, 4), pytest.param(range(4, 10), marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("codec", COMPRESSING)
def test_decoding_waits_for_the_copy_under_every_schedule(codec: str, seeds: range) -> None:
    """Bytes that have not arrived are poison: read too early, they would change the gradient."""
    expected = step(codec).gradient
    for seed in seeds:
        window = ("layer", 0, 3 * SLOT_BYTES)[seed % 3]
        found = step(codec, window=window, seed=seed)
        assert torch.equal(found.gradient, expected), (seed, window)
