"""The replay of CUDA's caching allocator: outcomes that follow from its source, and invariants.

Each hand-written case names the function of ``c10/cuda/CUDACachingAllocator.cpp`` that decides it.
"""

from __future__ import annotations

import gc
import math
from contextlib import closing
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def allocator(limit_mib: float = math.inf, **changes: object) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings(**changes), limit_bytes=limit_mib * MIB)  # type: ignore[arg-type]


def held(device: CachingAllocator) -> tuple[float, float]:
    """Return what is allocated and reserved, in MiB."""
    return device.allocated_bytes / MIB, device.reserved_bytes / MIB


# ---- sizes: round_size, get_allocation_size, should_split ---------------------------------------


def test_requests_are_rounded_to_512_bytes_in_segments_of_2_mib() -> None:
    device = allocator()
    sizes = [device.allocate(nbytes).size for nbytes in (0, 1, 512, 513)]
    assert sizes == [512, 512, 512, 1024]
    assert device.reserved_bytes == 2 * MIB


def test_the_small_pool_ends_at_1_mib() -> None:
    device = allocator()
    device.allocate(MIB)
    device.allocate(MIB)
    assert device.reserved_bytes == 2 * MIB
    device.allocate(MIB + 1)
    assert device.reserved_bytes == 22 * MIB  # a large segment, shared by requests below 10 MiB


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


def test_two_of_9_mib_share_a_segment_and_the_third_does_not() -> None:
    device = allocator()
    for expected in (20, 20, 40):
        device.allocate(9 * MIB)
        assert device.reserved_bytes == expected * MIB


def test_a_large_block_is_split_if_more_than_1_mib_is_left() -> None:
    device = allocator()
    device.free(device.allocate(32 * MIB))
    block = device.allocate(31 * MIB)
    assert held(device) == (32, 32)  # what is left, 1 MiB, stays with the block
    device.free(block)
    device.allocate(31 * MIB - 512)
    assert held(device) == (31 - 512 / MIB, 32)


def test_a_block_that_may_not_be_split_serves_only_requests_as_large() -> None:
    device = allocator(max_split_bytes=64 * MIB)
    block = device.allocate(100 * MIB)
    device.free(block)
    device.allocate(40 * MIB)  # below the size: not from an oversized block (get_free_block)
    assert held(device) == (40, 140)
    device.allocate(80 * MIB)  # 100 is not less than 80 + 20
    assert held(device) == (120, 220)
    assert device.allocate(81 * MIB) is block
    assert held(device) == (220, 220)  # whole: should_split


# ---- which block: get_free_block ----------------------------------------------------------------


def test_the_smallest_block_that_holds_it_is_taken_and_of_equals_the_lowest() -> None:
    device = allocator()
    blocks = [device.allocate(mib * MIB) for mib in (30, 20, 40, 20)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        device.free(block)
    assert device.allocate(20 * MIB).address == addresses[1]
    assert device.allocate(15 * MIB).address == addresses[3]
    assert device.allocate(25 * MIB).address == addresses[0]
    assert device.reserved_bytes == 110 * MIB


def test_streams_do_not_share_blocks() -> None:
    device = allocator()
    device.free(device.allocate(50 * MIB, stream=1))
    device.allocate(50 * MIB, stream=2)
    assert held(device) == (50, 100)


# ---- free_block, try_merge_blocks ---------------------------------------------------------------


def test_neighbours_merge_on_both_sides() -> None:
    device = allocator()
    segment = device.allocate(60 * MIB)
    device.free(segment)
    first, second, third = (device.allocate(20 * MIB) for _ in range(3))
    device.free(first)
    device.free(third)
    assert sorted(block.size for block in device.free_blocks()) == [20 * MIB, 20 * MIB]
    device.free(second)
    assert [block.size for block in device.free_blocks()] == [60 * MIB]
    assert device.reserved_bytes == 60 * MIB


def test_blocks_of_different_segments_never_merge() -> None:
    device = allocator()
    for block in [device.allocate(20 * MIB) for _ in range(2)]:
        device.free(block)
    device.allocate(40 * MIB)
    assert device.reserved_bytes == 80 * MIB


# ---- malloc: release_cached_blocks, release_available_cached_blocks -----------------------------


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    device = allocator(100)
    kept = device.allocate(20 * MIB)
    device.free(device.allocate(50 * MIB))
    device.allocate(60 * MIB)
    assert (held(device), device.num_retries) == ((80, 80), 1)
    device.free(kept)
    assert device.peak_reserved_bytes == 80 * MIB


def test_a_segment_that_is_partly_in_use_cannot_be_given_back() -> None:
    device = allocator(100)
    device.free(device.allocate(60 * MIB))
    device.allocate(2 * MIB)  # in the 60
    with pytest.raises(DeviceFullError, match="reserved"):
        device.allocate(59 * MIB)
    assert held(device) == (2, 60)


def test_oversized_blocks_are_given_back_one_by_one_and_the_others_kept() -> None:
    device = allocator(200, max_split_bytes=64 * MIB)
    blocks = [device.allocate(mib * MIB) for mib in (70, 70, 30)]
    for block in blocks:
        device.free(block)
    device.allocate(100 * MIB)
    # Neither 70 is enough by itself: the largest ones go until they sum to it.
    assert (held(device), device.num_retries) == ((100, 130), 0)


# ---- expandable segments ------------------------------------------------------------------------


def test_expandable_segments_grow_by_pages_of_20_mib_and_of_2_in_the_small_pool() -> None:
    device = CachingAllocator(EXPANDABLE)
    device.allocate(30 * MIB)
    assert device.reserved_bytes == 40 * MIB
    device.allocate(10 * MIB)
    assert device.reserved_bytes == 40 * MIB
    device.allocate(25 * MIB)
    assert device.reserved_bytes == 80 * MIB
    device.allocate(700 * KIB)
    device.allocate(700 * KIB)
    device.allocate(700 * KIB)  # 648 KiB are left of the first page: a block may lie in two
    assert device.reserved_bytes == 84 * MIB


def test_a_free_end_grows_by_what_is_missing() -> None:
    device = CachingAllocator(EXPANDABLE)
    device.allocate(40 * MIB)
    device.free(device.allocate(40 * MIB))
    device.allocate(90 * MIB)
    assert held(device) == (130, 140)  # 40 were there: 50 more are 60 in pages


def test_a_hole_is_taken_before_the_end_that_can_grow() -> None:
    device = CachingAllocator(EXPANDABLE)
    blocks = [device.allocate(40 * MIB) for _ in range(3)]
    device.free(blocks[0])
    device.free(device.allocate(30 * MIB))  # fits the hole of 40, and a free end of none
    end = device.allocate(45 * MIB)  # does not: the segment grows to 180
    device.free(end)
    assert device.allocate(20 * MIB).address == blocks[0].address
    assert device.reserved_bytes == 180 * MIB


def test_a_block_that_can_grow_counts_with_what_it_can_grow_to() -> None:
    device = CachingAllocator(EXPANDABLE)
    hole, _ = device.allocate(40 * MIB), device.allocate(40 * MIB)
    end = device.allocate(20 * MIB)
    device.free(hole)
    device.free(end)
    # The end, 20 MiB, is the smaller block; the hole is smaller than what the end can become.
    assert device.allocate(10 * MIB).address == hole.address


def test_whole_pages_in_the_middle_are_given_back_and_mapped_again_from_the_lowest_on() -> None:
    device = CachingAllocator(EXPANDABLE, limit_bytes=200 * MIB)
    first, middle, last = (device.allocate(mib * MIB) for mib in (30, 100, 30))
    assert device.reserved_bytes == 160 * MIB
    device.free(middle)
    device.allocate(120 * MIB)  # 140 at the end would pass 200; of 30 to 130, 40 to 120 are pages
    assert (held(device), device.num_retries) == ((180, 200), 1)
    assert sorted(block.size for block in device.free_blocks()) == [10 * MIB, 10 * MIB]
    assert first.address < last.address


def test_expandable_blocks_are_split_to_the_last_512_bytes() -> None:
    device = CachingAllocator(EXPANDABLE)
    device.free(device.allocate(20 * MIB))
    device.allocate(20 * MIB - 1024)
    assert [block.size for block in device.free_blocks()] == [1024]


# ---- whatever is asked for ----------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(0, 3 * MIB),
    st.integers(0, 80 * MIB),
    st.sampled_from([MIB, 10 * MIB, 20 * MIB]),
)
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 40), st.integers(0, 1)), max_size=60)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_bytes=st.sampled_from([math.inf, 20 * MIB, 40 * MIB]),
)


def blocks_from(block: Block) -> list[Block]:
    """Return all blocks of a segment, by address."""
    while block.previous is not None:
        block = block.previous
    found = [block]
    while found[-1].next is not None:
        found.append(found[-1].next)
    return found


def check(device: CachingAllocator, live: dict[Block, int]) -> None:
    """Check what holds at any time: no overlap, nothing lost, neighbours merged."""
    free = list(device.free_blocks())
    assert all(block.is_free and block.is_mapped for block in free)
    assert not any(block.is_free for block in live)
    assert device.allocated_bytes == sum(block.size for block in live)
    assert device.reserved_bytes == sum(block.size for block in [*live, *free])
    assert device.reserved_bytes <= device.limit_bytes
    for block, nbytes in live.items():
        assert block.size >= nbytes
        assert block.size % 512 == 0
    ranges = sorted((each.address, each.size) for each in [*live, *free])
    for (start, size), (following, _) in pairwise(ranges):
        assert start + size <= following
    for block in [*live, *free]:
        segment = blocks_from(block)
        for each, behind in pairwise(segment):
            assert each.address + each.size == behind.address
            both_free = each.is_free and behind.is_free
            assert not (both_free and each.is_mapped == behind.is_mapped)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, how=SETTINGS, limit=st.sampled_from([math.inf, 60 * MIB, 200 * MIB]))
def test_nothing_overlaps_and_nothing_is_lost(
    steps: list[tuple[int, int, int]], how: AllocatorSettings, limit: float
) -> None:
    device = CachingAllocator(how, limit_bytes=limit)
    live: dict[Block, int] = {}
    for nbytes, which, stream in steps:
        if which < len(live):
            block = list(live)[which]
            del live[block]
            device.free(block)
        else:
            try:
                live[device.allocate(nbytes, stream)] = nbytes
            except DeviceFullError:
                assert not math.isinf(limit)
        check(device, live)
    for block in live:
        device.free(block)
    device.release_cached()
    assert (device.allocated_bytes, device.reserved_bytes) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(steps=STEPS, how=SETTINGS)
def test_a_limit_at_the_peak_changes_nothing(
    steps: list[tuple[int, int, int]], how: AllocatorSettings
) -> None:
    def run(limit_bytes: float) -> CachingAllocator:
        device = CachingAllocator(how, limit_bytes=limit_bytes)
        live: list[Block] = []
        for nbytes, which, stream in steps:
            if which < len(live):
                device.free(live.pop(which))
            else:
                live.append(device.allocate(nbytes, stream))
        return device

    free = run(math.inf)
    bound = run(free.peak_reserved_bytes)
    assert bound.peak_reserved_bytes == free.peak_reserved_bytes
    assert (bound.peak_allocated_bytes, bound.num_retries) == (free.peak_allocated_bytes, 0)


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
