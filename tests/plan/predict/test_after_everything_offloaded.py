"""A step that keeps everything, behind steps that offloaded everything: what the allocator does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from hf_pyao.plan.hardware.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.step.prediction import FREED
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import WAYS

NUM_OFFLOADED = 10
"""Steps with everything offloaded, as policy `auto` runs them before it has a plan."""


def run(events: Any, allocator: CachingAllocator) -> None:
    """Replay one step; what it does not free ends with it."""
    live: dict[Any, Any] = {}
    for key, nbytes in events:
        if nbytes == FREED:
            block = live.pop(key, None)
            if block is not None:
                allocator.free(block)
        elif nbytes > 0:
            live[key] = allocator.allocate(nbytes)
    for block in live.values():
        allocator.free(block)


@pytest.mark.thorough
@pytest.mark.parametrize("is_released", [False, True])
def test_plain_training_fits_behind_offloading_where_cached_segments_are_released(
    is_released: bool,
) -> None:
    """OPT-1.3B at 8 on 12 GiB: without the release it runs out of memory once everything fits."""
    ways = {way.name: way for way in WAYS}
    estimator = Estimator(config_of(parse_model("opt:1.3b")), find_hardware("rtx4070"))
    offloaded, _ = estimator.predicted(ways["policy all"], 8)
    kept, _ = estimator.predicted(ways["none"], 8)
    assert kept.memory.fits(estimator.limit_bytes)
    allocator = CachingAllocator(AllocatorSettings(), limit_bytes=estimator.limit_bytes)
    for each in kept.program.residents:
        allocator.allocate(each.nbytes)
    for _ in range(NUM_OFFLOADED):
        run(offloaded.late.memory, allocator)
    with contextlib.nullcontext() if is_released else pytest.raises(DeviceFullError):
        if is_released:
            allocator.release_cached()
        for _ in range(3):
            run(kept.late.memory, allocator)
