"""The schedule of streamed blocks, driven on integers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hf_pyao.engine.transfer.ring_schedule import RingSchedule, resident_layers


class Noted(RingSchedule):
    """Notes its uploads."""

    def __init__(self, num_blocks: int, num_slots: int = 2) -> None:
        super().__init__(num_blocks, num_slots)
        self.uploads: list[int] = []
        self.last_use = -1

    def upload(self, block: int, slot: int) -> None:
        assert block not in self.slots
        self.uploads.append(block)


def run(ring: Noted, blocks: Sequence[int], *, in_backward: bool) -> None:
    for block in blocks:
        slot = ring.use(block, in_backward=in_backward)
        assert ring.slots[slot] == block
        ring.ahead()
        assert ring.slots[slot] == block, "the block in use stays"


def train(ring: Noted) -> int:
    """Run a step; return how many blocks it uploaded."""
    before = len(ring.uploads)
    ring.begin(trains=True)
    run(ring, range(ring.num_blocks), in_backward=False)
    run(ring, range(ring.num_blocks)[::-1], in_backward=True)
    return len(ring.uploads) - before


@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 7, 24])
def test_a_step_uploads_no_block_twice_at_its_turns(num_blocks: int, num_slots: int) -> None:
    ring = Noted(num_blocks, num_slots)
    first = train(ring)
    later = [train(ring) for _ in range(3)]
    on_ring = min(num_blocks, num_slots)
    assert first == 2 * num_blocks - on_ring
    assert later == [2 * (num_blocks - on_ring)] * 3
    assert ring.num_late_uploads == 1, "all but the very first were uploaded ahead"


@pytest.mark.parametrize("num_resident", [1, 2, 3, 5, 8])
def test_resident_layers_at_the_turns_change_no_upload(num_resident: int) -> None:
    """Compute leaves the last streamed block for a resident layer, and comes back to it."""
    num_layers = 12
    stay = resident_layers(num_layers, num_resident)
    blocks = {layer: n for n, layer in enumerate(sorted({*range(num_layers)} - {*stay}))}
    ring = Noted(len(blocks))
    counts = []
    for _ in range(3):
        before = len(ring.uploads)
        ring.begin(trains=True)
        turns = [(layer, False) for layer in range(num_layers)]
        for layer, in_backward in (*turns, *((layer, True) for layer, _ in reversed(turns))):
            if layer in blocks:
                ring.use(blocks[layer], in_backward=in_backward)
            else:
                ring.leave(in_backward=in_backward)
            ring.ahead()
        counts.append(len(ring.uploads) - before)
    num = len(blocks)
    assert counts == [2 * num - 2, 2 * (num - 2), 2 * (num - 2)]


def test_evaluation_uploads_each_block_ahead_and_training_goes_on_as_before() -> None:
    ring = Noted(5)
    train(ring)
    for _ in range(3):
        ring.begin(trains=False)
        before = len(ring.uploads)
        run(ring, range(5), in_backward=False)
    assert len(ring.uploads) - before == 5
    late = ring.num_late_uploads
    train(ring)
    assert train(ring) == 6
    assert ring.num_late_uploads <= late + 1, "where training begins again, one block may be late"


def test_the_order_of_segments_that_run_again_is_learnt_from_the_cycle_before() -> None:
    ring = Noted(6)
    for step in range(3):
        late = ring.num_late_uploads
        ring.begin(trains=True)
        run(ring, range(6), in_backward=False)
        for first in (4, 2, 0):
            run(ring, [first, first + 1], in_backward=True)
            run(ring, [first + 1, first], in_backward=True)
        if step:
            assert ring.num_late_uploads == late


def test_several_forwards_before_their_backwards_are_one_cycle() -> None:
    ring = Noted(4)
    for step in range(3):
        late = ring.num_late_uploads
        for _ in range(2):
            ring.begin(trains=True)
            run(ring, range(4), in_backward=False)
        for _ in range(2):
            run(ring, range(4)[::-1], in_backward=True)
        if step:
            assert ring.num_late_uploads == late


@pytest.mark.parametrize("seed", range(4))
def test_any_order_finds_its_blocks(seed: int) -> None:
    rng = random.Random(seed)
    ring = Noted(rng.randint(1, 6), rng.randint(2, 4))
    for _ in range(200):
        what = rng.random()
        if what < 0.1:
            ring.begin(trains=rng.random() < 0.5)
        elif what < 0.2:
            ring.leave(in_backward=rng.random() < 0.5)
        elif what < 0.25:
            ring.forget(rng.randrange(ring.num_blocks))
        else:
            run(ring, [rng.randrange(ring.num_blocks)], in_backward=rng.random() < 0.5)
        held = [block for block in ring.slots if block is not None]
        assert len(held) == len(set(held))


def test_resident_layers_are_spread_over_the_depth() -> None:
    assert resident_layers(8, 0) == ()
    assert resident_layers(8, 2) == (2, 6)
    assert resident_layers(3, 5) == (0, 1, 2)
    for num_layers in range(1, 20):
        for num_resident in range(num_layers + 1):
            stay = resident_layers(num_layers, num_resident)
            assert len(set(stay)) == num_resident
            assert all(0 <= layer < num_layers for layer in stay)
