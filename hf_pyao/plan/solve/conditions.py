"""Under which conditions a recorded step is planned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.solve.steering import PRESET
from hf_pyao.plan.step.disk_share import DiskShare
from hf_pyao.plan.step.planned_step import PlannedStep, StepPlanner


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which a step is planned."""

    link: LinkModel
    window_bytes: int | None
    """As ``PyAOConfig.window``; None: ``"layer"``."""
    min_bytes: int = 65536
    """Smaller slots stay."""
    keep_last_layers: int = 1
    gradient_bytes: int = 0
    """What leaves in backward beside, for each layer."""
    may_offload: bool = True
    may_recompute: bool = True
    may_checkpoint: bool = False
    """The first layers may run again as a whole."""
    host: HostCosts | None = None
    """What a step costs the host; None: it is never slower than the device."""
    may_shrink_window: bool = True
    """A tighter window may be taken."""
    may_keep_fewer: bool = True
    """Fewer last layers may be kept."""
    allocator: AllocatorSettings | None = None
    """Of the device's caching allocator, by which a plan fits or not; None: what is allocated
    counts, and nothing of what an allocator reserves beside."""
    rebuild_factor: float = 1.0
    """What operations take that run again, by what they took the first time."""
    is_blocking: bool = False
    """Compute stands still while copies run, as where the host is the device."""
    placed_weights: DiskShare | None = None
    """The streamed weights that lie on a disk; None: as many as the host has no room for."""
    speed_ratios: tuple[float, ...] = PRESET
    """By which factors the link may be faster than said, for compute as said. At none of them a
    plan is much slower than a plain way that fits."""


def outcome_of(step: PlannedStep, conditions: Conditions) -> Outcome:
    """Return what *step* comes to under *conditions*."""
    return Outcome(
        step,
        conditions.link,
        window_bytes=conditions.window_bytes,
        allocator=conditions.allocator,
        gradient_bytes=conditions.gradient_bytes,
        is_blocking=conditions.is_blocking,
        host=conditions.host,
    )


def chosen_slots(planner: StepPlanner, layer: int, min_bytes: int) -> list[int]:
    """Return the numbers of a layer's slots of which something is decided."""
    return [
        number
        for number in planner.slots_of(layer)
        if (slot := planner.program.slots[number]).stays is None
        and slot.link_bytes > 0
        and slot.nbytes >= min_bytes
    ]


def equal_layers(planner: StepPlanner, min_bytes: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return the first *num_layers* layers, those together that save the same.

    Layers of which nothing is decided are left out.
    """
    found: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for layer in range(num_layers):
        slots = [
            planner.program.slots[number] for number in chosen_slots(planner, layer, min_bytes)
        ]
        if slots:
            found[tuple((slot.name, slot.nbytes, slot.link_bytes) for slot in slots)].append(layer)
    return [tuple(layers) for layers in found.values()]
