"""With a codec, what is brought back ahead takes less memory, and gradients are those of the codec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from bench.bench_codecs import study_codec
from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.plan.step.ledger import MemoryLedger
from tests.helpers.simulation.transport import SimulatedTicket, SimulatedTransport

NUM_LAYERS, NUM_SLOTS = 4, 16
ROWS, COLUMNS = 16, 256
SLOT_BYTES = ROWS * COLUMNS * 4

PAYLOAD_BYTES = {
    "identity": SLOT_BYTES,
    "int8": ROWS * COLUMNS + 4 * ROWS,
    "int8_group": ROWS * COLUMNS + 4 * ROWS * COLUMNS // 128,
    "fp8": ROWS * COLUMNS + 4 * ROWS,
    "int4": ROWS * COLUMNS // 2 + 4 * ROWS * COLUMNS // 64,
}
"""Codes, and a float32 scale for each row or group; multiples of 64 all, so without padding."""

COMPRESSING = [name for name in PAYLOAD_BYTES if name != "identity"]


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
    """Counts the bytes of reloaded buffers that live at once."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.reloaded = MemoryLedger()

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **how: Any) -> SimulatedTicket:
        self.reloaded.note([dst])
        return super().reload(src, dst, **how)


def step(codec: str, *, window: str | int = "layer", seed: int = 0) -> tuple[torch.Tensor, int]:
    """Run one forward and backward on the simulated accelerator, all layers offloaded.

    Returns:
        The input's gradient, and the most bytes that were there of what was brought back.
    """
    register_module_map("CompressedLinkStack", ModuleMap(layers=("layers",)))
    transport = MeasuringTransport(seed)
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
    with attach(stack, config, transport=transport):
        stack(x).sum().backward()
        assert not transport.violations
    assert x.grad is not None
    return x.grad, transport.reloaded.peak_bytes


@pytest.mark.parametrize("codec", PAYLOAD_BYTES)
def test_what_is_brought_back_ahead_takes_its_encoded_size(codec: str) -> None:
    """One layer ahead by the paper's rule: at most two layers' payloads are there at once."""
    _, reload_peak_bytes = step(codec)
    in_two_layers = 2 * NUM_SLOTS * PAYLOAD_BYTES[codec]
    assert in_two_layers // 2 <= reload_peak_bytes <= in_two_layers


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
        assert torch.equal(step(name)[0], expected), name
        assert not torch.equal(step("identity")[0], expected), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seeds", [range(1, 4), pytest.param(range(4, 10), marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("codec", COMPRESSING)
def test_decoding_waits_for_the_copy_under_every_schedule(codec: str, seeds: range) -> None:
    """Bytes that have not arrived are poison: read too early, they would change the gradient."""
    expected, _ = step(codec)
    for seed in seeds:
        window = ("layer", 0, 3 * SLOT_BYTES)[seed % 3]
        found, _ = step(codec, window=window, seed=seed)
        assert torch.equal(found, expected), (seed, window)
