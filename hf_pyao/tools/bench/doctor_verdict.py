"""What ``pyao doctor`` ends with: which way to train is fastest on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_pyao.plan.hardware.link_speed import LinkSpeed
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from hf_pyao.tools.bench.doctor import Machine

LAUNCH_US = 3.0
"""Least time of an operation. An assumption."""


@dataclass(frozen=True)
class Verdict:
    """The answer, for one model."""

    model: str
    words: str


def verdict_on(machine: Machine, model: str, *, sequence_length: int = 512) -> Verdict:
    """Return which way of training *model* is fastest, with the speeds that were measured.

    Args:
        machine: what was looked at.
        model: as ``pyao estimate`` takes it.
        sequence_length: tokens of a sample.

    Raises:
        ConfigError: the model is unknown.
    """
    hardware = hardware_of(machine)
    if hardware is None:
        return Verdict(
            model,
            "No verdict on speed: there is no accelerator whose speed could be measured. For a "
            f"card that you think of: pyao estimate --model {model} --device NAME.",
        )
    from hf_pyao.tools.estimate.command import estimate_report

    report = estimate_report(
        model, hardware, sequence_length=sequence_length, with_longest=False, num_processes=1
    )
    where = f"{model}, {sequence_length} tokens, all weights trained"
    return Verdict(model, f"{where}: {report.verdict} (Estimated from the speeds above.)")


def hardware_of(machine: Machine) -> Hardware | None:
    """Return the machine as estimates take it; None if it has no accelerator that was measured."""
    link, speed = LinkSpeed(**machine.link), machine.speed
    memory_gib = machine.device.get("memory_gib")
    if not link.d2h_gib_per_s or not link.h2d_gib_per_s or not memory_gib:
        return None
    if not speed.tflop_per_s or not speed.memory_gib_per_s:
        return None
    return Hardware(
        name=str(machine.device["name"]),
        device=DeviceModel(
            tflop_per_s=speed.tflop_per_s,
            memory_gib_per_s=speed.memory_gib_per_s,
            launch_us=LAUNCH_US,
        ),
        link=dataclasses.replace(
            LinkModel(d2h_gib_per_s=link.d2h_gib_per_s, h2d_gib_per_s=link.h2d_gib_per_s),
            copy_engines=1 if link.is_duplex is False else 2,
        ),
        memory_gib=float(memory_gib),
        context_gib=min(float(machine.device.get("context_gib") or 0.0), float(memory_gib) / 2),
        source="measured by pyao doctor",
    )
