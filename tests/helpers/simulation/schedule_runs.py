"""The transfer schedule on the simulated accelerator: step time and memory peak of equal layers.

The real engine runs layers with known compute time and saved bytes, copies on a virtual link
(`virtual_link.py` says what it assumes). All of it is arithmetic on a virtual clock.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.engine.transfer.schedule import Schedule
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport
from tests.helpers.simulation.virtual_link import VirtualLink


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """A stack of equal layers, each saving *num_slots* equal tensors at even intervals."""

    num_layers: int = 20
    num_slots: int = 8
    layer_bytes: int = 8 * 4096
    forward_ms: float = 1.0
    backward_ms: float = 2.0
    gradient_bytes: int = 0
    """Sent to the host when a layer's backward ends, as an optimizer on the host wants it."""


UNIT_LAYERS = LayerModel()


@dataclass(frozen=True)
class Outcome:
    """What one micro-batch took."""

    step_ms: float
    """Until compute is done."""
    peak_bytes: int
    metrics: dict[str, float]


class _Slot(torch.autograd.Function):
    """Computes for a while and saves its result, as an activation function does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SyntheticLayer) -> torch.Tensor:
        layer.link.advance(layer.model.forward_ms / layer.model.num_slots)
        ctx.layer = layer
        result = x + 1
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        if not torch.isfinite(result).all():
            raise AssertionError("a saved tensor was read before it had arrived")
        model = ctx.layer.model
        ctx.layer.link.advance(model.backward_ms / model.num_slots)
        return gradient, None


class SyntheticLayer(nn.Module):
    """A layer whose compute goes to the virtual clock."""

    def __init__(self, model: LayerModel, link: VirtualLink) -> None:
        super().__init__()
        self.model = model
        self.link = link

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.gradient_bytes and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._send_gradient)
        for _ in range(self.model.num_slots):
            x = _Slot.apply(x, self)
        return x

    def _send_gradient(self, _: torch.Tensor) -> None:
        self.link.book("gradient", self.model.gradient_bytes, label="gradient")


class SyntheticStack(nn.Module):
    """Layers in a row."""

    def __init__(self, model: LayerModel, link: VirtualLink) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SyntheticLayer(model, link) for _ in range(model.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_schedule(
    ratio: float,
    *,
    window: str | int = 2 * UNIT_LAYERS.layer_bytes,
    copy_streams: int = 2,
    copy_engines: int = 2,
    prefetches: bool = True,
    gradient_bytes: int = 0,
) -> Outcome:
    """Run two micro-batches of unit layers on the virtual clock; return the second's outcome.

    A layer's copies take *ratio* times its forward compute, each way.
    """
    layers = dataclasses.replace(UNIT_LAYERS, gradient_bytes=gradient_bytes)
    speed = layers.layer_bytes / GIB / (layers.forward_ms * ratio / 1e3)
    link = LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed, copy_engines=copy_engines)
    transport = SimulatedTransport(0, copy_streams=copy_streams, link=link)
    assert transport.link is not None
    register_module_map("SyntheticStack", ModuleMap(layers=("layers",)))
    stack = SyntheticStack(layers, transport.link).train()
    prefetch = Schedule.prefetch if prefetches else (lambda self: None)
    free = DeviceModel(tflop_per_s=1e9, memory_gib_per_s=1e9, launch_us=0.0)
    config = PyAOConfig(policy="all", min_bytes=0, window=window)
    with (
        attach(stack, config, transport=transport) as offloader,
        mock.patch.object(Schedule, "prefetch", prefetch),
    ):
        for _ in range(2):
            start_ms = transport.link.compute_ms
            device = SimulatedDevice(free, transport.link, offloader.host_pool)
            with device:
                count = layers.layer_bytes // layers.num_slots // 4
                x = torch.zeros(count, requires_grad=True)
                stack(x).sum().backward()
                x.grad = None
        step_ms = transport.link.compute_ms - start_ms
        transport.link.finish()
        return Outcome(step_ms, device.ledger.peak_bytes, offloader.metrics())
