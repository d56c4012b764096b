"""The replay of CUDA's caching allocator, event by event beside a plain one."""

from __future__ import annotations

import gc
import math
from contextlib import closing
from random import Random

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    DeviceFullError,
    segment_bytes,
)
from tests.helpers.plain_allocator import PlainAllocator, Range

KIB = 2**10
MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


# ---- sizes: get_allocation_size of CUDACachingAllocator.cpp -------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (2**30 - 512, 2**30),
    ],
)
def test_segments(size: int, expected: int) -> None:
    assert segment_bytes(size) == expected


# ---- whatever is asked for ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(every=1)
def test_each_event_is_served_as_by_a_plain_allocator(seed: int) -> None:
    draw = Random(seed)
    how = AllocatorSettings(
        expandable_segments=seed % 2 == 1,
        max_split_bytes=draw.choice([math.inf, math.inf, 20 * MIB, 40 * MIB]),
        max_non_split_rounding_bytes=draw.choice([MIB, 20 * MIB]),
    )
    limit = draw.choice([math.inf, 100, 200, 400]) * MIB
    device = CachingAllocator(how, limit_bytes=limit)
    plain = PlainAllocator(
        limit,
        expandable=how.expandable_segments,
        max_split=how.max_split_bytes,
        max_rounding=how.max_non_split_rounding_bytes,
    )
    sizes = [draw.randrange(draw.choice([4 * KIB, 2 * MIB, 80 * MIB])) for _ in range(8)]
    most_live = draw.randint(2, 30)
    live: list[tuple[Block, Range]] = []
    for _ in range(200):
        if live and draw.random() < len(live) / (2 * most_live):
            block, same = live.pop(draw.randrange(len(live)))
            device.free(block)
            plain.free(same)
        else:
            nbytes, stream = draw.choice(sizes), int(draw.random() < 0.1)
            try:
                expected = plain.allocate(nbytes, stream)
            except MemoryError:
                with pytest.raises(DeviceFullError):
                    device.allocate(nbytes, stream)
            else:
                live.append((device.allocate(nbytes, stream), expected))
        assert device.num_retries == plain.num_retries
        assert (device.allocated_bytes, device.reserved_bytes) == (plain.allocated, plain.reserved)
        assert [block.size for block, _ in live] == [same.size for _, same in live]
    assert device.peak_allocated_bytes == plain.peak_allocated
    assert device.peak_reserved_bytes == plain.peak_reserved


@pytest.mark.parametrize("chosen", [AllocatorSettings(), EXPANDABLE])
def test_an_allocator_that_is_closed_leaves_no_garbage(chosen: AllocatorSettings) -> None:
    """Blocks hold their neighbours: thousands of them are left for the collector otherwise."""
    for _ in range(3):  # what other tests left may take several
        gc.collect()
    with closing(CachingAllocator(chosen, limit_bytes=400 * MIB)) as device:
        live = device.run([MIB // 4] * 500 + [each * MIB for each in (3, 40, 90, 7)])
        device.run([~1, ~7, ~501, ~502], live)
        with pytest.raises(DeviceFullError):
            device.allocate(399 * MIB)
        counts = device.peak_allocated_bytes, device.num_retries
    assert (device.peak_allocated_bytes, device.num_retries) == counts
    assert counts[1] > 0
    del live, device
    assert gc.collect() < 50


# ---- PYTORCH_CUDA_ALLOC_CONF --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", EXPANDABLE),
        ("expandable_segments:False", AllocatorSettings()),
        ("max_split_size_mb:128", AllocatorSettings(max_split_bytes=128 * MIB)),
        (
            "backend:native, expandable_segments : True,roundup_power2_divisions:[64:8,>:1]",
            EXPANDABLE,
        ),
    ],
)
@pytest.mark.sampled(every=1)
def test_settings_are_read(text: str, expected: AllocatorSettings) -> None:
    found = AllocatorSettings.parse(text)
    assert found == expected
    assert AllocatorSettings.parse(str(found)) == found


@pytest.mark.parametrize("text", ["expandable_segments:yes", "max_split_size_mb:-1", "fast"])
@pytest.mark.sampled(every=1)
def test_settings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        AllocatorSettings.parse(text)
