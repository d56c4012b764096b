"""The search against brute force over the same walks, its chain of variants, and its slope."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from random import Random

import pytest
import transformers

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.paper.pyao_plan import paths_of
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.candidate import CHECKPOINT, PLANNED, Candidate
from hf_pyao.plan.solve.conditions import Conditions, chosen_slots
from hf_pyao.plan.solve.planner import NoPlanFitsError, Planner
from hf_pyao.plan.solve.search import spread_order
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

CARD = find_hardware("rtx4070")
NUM_DRAWN = 200
NUM_LAYERS = 3


@cache
def small_program() -> StepProgram:
    """Return a step of three layers, each of which saves two tensors of four times its width."""
    config = transformers.GPTNeoXConfig(
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        vocab_size=96,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return record_step(FakeTraining(config=config), 2, 56)


def drawn_planner(random: Random, keep_last_layers: int = 1) -> Planner:
    """Return the planner of a small step with drawn times, equal ones in equal layers."""
    program = small_program()
    times_ms = list(operation_times_ms(program, CARD.device))
    drawn: dict[tuple[str, int, int], float] = {}
    for segment in program.segments:
        for number in range(segment.start, segment.end):
            key = (segment.phase, min(segment.layer, 0), number - segment.start)
            drawn.setdefault(key, random.choice((0.1, 1.0)) * random.random())
            times_ms[number] = times_ms[number] and drawn[key]
    speed = random.choice((0.02, 0.1, 1.0))
    link = dataclasses.replace(
        CARD.link,
        d2h_gib_per_s=speed,
        h2d_gib_per_s=speed * random.choice((0.7, 1.0)),
        copy_engines=random.choice((1, 2)),
    )
    conditions = Conditions(
        link=link,
        window_bytes=random.choice((2**10, 2**15)),
        min_bytes=2 * 56 * 192 * 2,
        keep_last_layers=keep_last_layers,
        may_shrink_window=False,
        speed_ratios=MEASURED,
    )
    return Planner(program, times_ms, conditions)


def every_plan(planner: Planner) -> list[Candidate]:
    """Return each choice for each slot, with and without matrix products that run again."""
    conditions, slots = planner.conditions, planner.program.slots
    numbers = [
        number
        for layer in range(planner.num_open_layers)
        for number in chosen_slots(planner.stepper, layer, conditions.min_bytes)
    ]
    found = []
    for choice in itertools.product((KEEP, OFFLOAD, RECOMPUTE), repeat=len(numbers)):
        actions = [KEEP] * len(slots)
        for number, action in zip(numbers, choice, strict=True):
            actions[number] = action
        for products in ((), paths_of(planner.program)) if RECOMPUTE in choice else ((),):
            found.append(planner.candidate("any", actions, products))
    return found


@pytest.mark.parametrize("seed", range(NUM_DRAWN))
@pytest.mark.sampled(every=70)
def test_no_plan_of_a_small_step_is_much_faster(seed: int) -> None:
    """Within 1 % of brute force; every other limit is the least with which any plan fits."""
    random = Random(seed)
    planner = drawn_planner(random, keep_last_layers=0 if seed % 8 == 7 else 1)
    every = every_plan(planner)
    least, most = min(each.peak_bytes for each in every), planner.kept.peak_bytes
    limit = least + (random.random() if seed % 2 else 0.0) * (most - least)
    fastest = min(each.step_ms for each in every if each.peak_bytes <= limit)
    chosen = planner.best(limit)
    assert chosen.peak_bytes <= limit
    assert chosen.step_ms <= 1.01 * fastest


def test_where_nothing_fits_and_all_lack_as_much_it_goes_up_the_chain() -> None:
    """All that may leave lowers no peak here: only the highest rungs fit."""
    planner = drawn_planner(Random(15), keep_last_layers=0)
    checkpoint = planner.simple()[CHECKPOINT]
    chosen = planner.best(checkpoint.peak_bytes + 27_000)
    assert chosen.name == PLANNED
    assert chosen.step_ms < checkpoint.step_ms


def test_variants_drop_more_and_more_for_more_and_more_time() -> None:
    planner = drawn_planner(Random(3))
    for chain in planner.chains:
        for before, after in itertools.pairwise(chain.variants):
            assert before.drops < after.drops
            assert before.products <= after.products
            assert before.freed_bytes < after.freed_bytes
            assert before.again_ms < after.again_ms
        assert len(chain.variants) > 1


def test_what_must_run_again_does_in_every_variant() -> None:
    given = drawn_planner(Random(4))
    first = planner_slots(given)[0]
    planner = Planner(
        given.program,
        given.stepper.times_ms,
        given.conditions,
        forced=lambda name: name == first,
    )
    assert all(first in each.drops for chain in planner.chains for each in chain.variants)
    limit = given.least().peak_bytes
    limit += (given.kept.peak_bytes - limit) // 3
    chosen = planner.best(limit)
    if chosen.name == "planned":
        named = zip(planner.program.slots, chosen.actions, strict=True)
        open_layers = range(planner.num_open_layers)
        forced = {a for slot, a in named if slot.name == first and slot.layer in open_layers}
        assert forced == {RECOMPUTE}


def planner_slots(planner: Planner) -> list[str]:
    """Return the names of a layer's slots of which something is decided."""
    numbers = chosen_slots(planner.stepper, 0, planner.conditions.min_bytes)
    return [planner.program.slots[number].name for number in numbers]


def test_a_full_host_leaves_more_to_be_made_again() -> None:
    drawn = drawn_planner(Random(0))
    program, times_ms = drawn.program, drawn.stepper.times_ms
    conditions = dataclasses.replace(drawn.conditions, window_bytes=2**10)
    offloads = Planner(program, times_ms, dataclasses.replace(conditions, may_recompute=False))
    limit = offloads.least().peak_bytes
    host_bytes = offloads.best(limit).host_bytes // 2
    assert host_bytes
    planner = Planner(program, times_ms, conditions, host_limit_bytes=host_bytes)
    chosen = planner.best(limit)
    assert chosen.host_bytes <= host_bytes
    assert chosen.peak_bytes <= limit
    with pytest.raises(NoPlanFitsError):
        planner.best(planner.least().peak_bytes - 1)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 24, 80])
def test_every_beginning_of_the_order_is_spread(number: int) -> None:
    order = spread_order(number)
    assert sorted(order) == list(range(number))
    for end in range(2, number + 1):
        gaps = [b - a for a, b in itertools.pairwise(sorted(order[:end]))]
        assert max(gaps) <= 2 * number / end + 2
