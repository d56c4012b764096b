"""Simulate the transfer schedule: step time and memory peak on hardware that is not here.

    python recipes/studies/simulate_schedule.py
    python recipes/studies/simulate_schedule.py --result recipes/results/simulated_schedule.json

The real engine runs on the simulated accelerator: layers with known compute time and saved bytes,
copies on a virtual link (see `tests/helpers/simulation/virtual_link.py` for what it assumes). The
first table varies how long a layer's copies take against its forward compute. The second puts in
the PyAO paper's models and hardware, to set two streams against one, as its Table 3 does. All of
it is arithmetic on a virtual clock, the same on every machine; none of it is a measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_pyao import ModuleMap, PyAOConfig, attach, register_module_map
from hf_pyao.engine.transfer.schedule import Schedule
from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from result_file import write_result
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport
from tests.helpers.simulation.virtual_link import VirtualLink

SCHEMA_VERSION = 1
SHRINK = 8192
"""Bytes and speeds are divided by this, so that a gigabyte takes a megabyte to simulate."""


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

    @property
    def compute_ms(self) -> float:
        """Compute of a whole micro-batch."""
        return self.num_layers * (self.forward_ms + self.backward_ms)


UNIT_LAYERS = LayerModel()


@dataclass(frozen=True)
class Outcome:
    """What one micro-batch took."""

    step_ms: float
    """Until compute is done."""
    end_ms: float
    """Until the last copy is done too."""
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


def simulate(
    layers: LayerModel,
    link_model: LinkModel,
    *,
    window: str | int,
    copy_streams: int = 2,
    prefetches: bool = True,
) -> Outcome:
    """Run two micro-batches on the virtual clock and return the second's outcome."""
    transport = SimulatedTransport(0, copy_streams=copy_streams, link=link_model)
    assert transport.link is not None
    register_module_map("SyntheticStack", ModuleMap(layers=("layers",)))
    stack = SyntheticStack(layers, transport.link).train()
    config = PyAOConfig(policy="all", min_bytes=0, window=window)
    prefetch = Schedule.prefetch if prefetches else (lambda self: None)
    free = DeviceModel(tflop_per_s=1e9, memory_gib_per_s=1e9, launch_us=0.0)
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
        end_ms = transport.link.finish() - start_ms
        return Outcome(step_ms, end_ms, device.ledger.peak_bytes, offloader.metrics())


def run_schedule(
    ratio: float,
    *,
    window: str | int = 2 * UNIT_LAYERS.layer_bytes,
    copy_streams: int = 2,
    copy_engines: int = 2,
    prefetches: bool = True,
    gradient_bytes: int = 0,
    host_memory_ratio: float = float("inf"),
) -> Outcome:
    """Simulate unit layers whose copies take *ratio* times their forward compute, each way.

    *host_memory_ratio* is the host memory's bandwidth over the link's.
    """
    layers = dataclasses.replace(UNIT_LAYERS, gradient_bytes=gradient_bytes)
    speed = layers.layer_bytes / GIB / (layers.forward_ms * ratio / 1e3)
    link_model = LinkModel(
        d2h_gib_per_s=speed,
        h2d_gib_per_s=speed,
        copy_engines=copy_engines,
        host_memory_gib_per_s=speed * host_memory_ratio,
    )
    return simulate(
        layers, link_model, window=window, copy_streams=copy_streams, prefetches=prefetches
    )


# Modelled RTX 4070 (50 TFLOP/s of fp16 with fp32 accumulation, 25 GB/s over PCIe 4.0, one copy
# engine), per layer and sample of 512 tokens: forward ms, MB saved, MB of fp16 weights.
PAPER_LAYERS = {
    "OPT-1.3B": (24, 1.19, 27.34, 100.7),
    "GPT-2 0.8B": (36, 0.70, 38.06, 39.3),
    "Llama 1.2B": (16, 1.66, 55.65, 121.6),
}
PAPER_LINK_GB_PER_S = 25.0
PAPER_MICRO_BATCH = 4


def paper_rows() -> list[dict[str, Any]]:
    """Set copies beside compute against copies in its way, for the paper's models."""
    speed = PAPER_LINK_GB_PER_S * 1e9 / GIB / SHRINK
    link_model = LinkModel(d2h_gib_per_s=speed, h2d_gib_per_s=speed, copy_engines=1)
    rows = []
    for name, (num_layers, forward_ms, saved_mb, weights_mb) in PAPER_LAYERS.items():
        for codec, factor in (("fp16", 1.0), ("int8", 0.5)):
            layers = LayerModel(
                num_layers=num_layers,
                layer_bytes=_multiple(saved_mb * 1e6 * PAPER_MICRO_BATCH * factor / SHRINK),
                forward_ms=forward_ms * PAPER_MICRO_BATCH,
                backward_ms=2 * forward_ms * PAPER_MICRO_BATCH,
                gradient_bytes=int(weights_mb * 1e6 / SHRINK),
            )
            window = 2 * layers.layer_bytes
            one = simulate(layers, link_model, window="layer", copy_streams=0).step_ms
            paper = simulate(layers, link_model, window="layer", copy_streams=1).step_ms
            ours = simulate(layers, link_model, window=window, copy_streams=2).step_ms
            rows.append(
                {
                    "model": name,
                    "bytes": codec,
                    "compute_ms": round(layers.compute_ms, 2),
                    "one_stream_ms": round(one, 2),
                    "copy_stream_meeting_at_layers_ms": round(paper, 2),
                    "copy_streams_byte_window_ms": round(ours, 2),
                }
            )
    return rows


def ratio_rows() -> list[dict[str, Any]]:
    """Vary the copies' time against compute, for each kind of schedule."""
    layer_bytes = UNIT_LAYERS.layer_bytes
    rows = []
    for ratio in (0.25, 0.5, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0):
        row: dict[str, Any] = {"ratio": ratio, "compute_ms": UNIT_LAYERS.compute_ms}
        ways: dict[str, dict[str, Any]] = {
            "no overlap": {"copy_streams": 0},
            "no prefetch": {"prefetches": False},
            "meeting at layers": {"window": "layer"},
            "window of 1 layer": {"window": layer_bytes},
            "window of 2 layers": {"window": 2 * layer_bytes},
            "window of 2, one engine": {"window": 2 * layer_bytes, "copy_engines": 1},
        }
        for name, options in ways.items():
            outcome = run_schedule(ratio, **options)
            row[name] = round(outcome.step_ms, 2)
            row[f"{name}: peak in layers"] = round(outcome.peak_bytes / layer_bytes, 2)
        rows.append(row)
    return rows


def _multiple(nbytes: float) -> int:
    return int(nbytes) // 32 * 32


def _print(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print()


def main() -> None:
    """Print both tables, and write them if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    ratios, paper = ratio_rows(), paper_rows()
    print("Virtual ms of a micro-batch by copy time over forward compute of a layer:\n")
    _print([{k: v for k, v in row.items() if "peak" not in k} for row in ratios])
    print("Device peak, in bytes that one layer saves (1 is the kept last layer):\n")
    _print([{k: v for k, v in row.items() if k == "ratio" or "peak" in k} for row in ratios])
    print(f"The paper's models, micro-batch {PAPER_MICRO_BATCH}, virtual ms:\n")
    _print(paper)
    if args.result is not None:
        write_result(
            args.result,
            kind="simulated_schedule",
            schema_version=SCHEMA_VERSION,
            ratio_rows=ratios,
            paper_rows=paper,
        )


if __name__ == "__main__":
    main()
