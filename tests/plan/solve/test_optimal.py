"""The integer program against brute force, its limits, and its speed on large models."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Iterator

import pytest

from hf_pyao.plan.solve import optimal
from hf_pyao.plan.solve.optimal import InfeasibleError, bound_ms, solve
from hf_pyao.plan.solve.placement import place, spread_order
from hf_pyao.plan.solve.plan_problem import (
    LayerGroup,
    PlanProblem,
    RebuildStep,
    SlotChoice,
    Source,
    Way,
)
from studies.judged_targets import large_problem


def draw_problem(seed: int) -> PlanProblem:
    """Return a problem small enough to try everything: up to 3 layers, 3 slots, 4 operations."""
    rng = random.Random(seed)
    num_layers = rng.randint(1, 3)

    def way(nbytes: int, codec: str | None = None) -> Way:
        share = 1.0 if codec is None else 0.5
        return Way(
            codec=codec,
            offload_ms=nbytes * share / rng.choice((2, 5, 20)),
            reload_ms=nbytes * share / rng.choice((2, 5, 20)),
            host_bytes=int(nbytes * share),
            forward_ms=0.0 if codec is None else rng.random(),
            backward_ms=0.0 if codec is None else rng.random(),
        )

    steps: list[RebuildStep] = []
    sources: list[Source] = []
    for position in range(rng.randint(0, 4)):
        is_product = rng.random() < 0.4
        if sources or rng.random() < 0.5:
            maker = rng.choice([None, *(n for n, s in enumerate(steps) if s.is_product)])
            nbytes = rng.randint(1, 20)
            sources.append(Source(nbytes=nbytes, ways=(way(nbytes),), maker=maker))
        steps.append(
            RebuildStep(
                elapsed_ms=rng.random() * rng.choice((0.1, 1, 10)),
                needs=tuple(
                    n for n in range(position) if not steps[n].is_product and rng.random() < 0.3
                ),
                sources=tuple(n for n in range(len(sources)) if rng.random() < 0.4),
                path=rng.choice("ab"),
                is_product=is_product,
            )
        )
    slots = []
    for number in range(rng.randint(1, 3)):
        nbytes = rng.randint(1, 30)
        ways = [way(nbytes)] if rng.random() < 0.8 else []
        if ways and rng.random() < 0.3:
            ways.append(way(nbytes, "int8"))
        maker = rng.choice([None, *range(len(steps))])
        slots.append(SlotChoice(name=f"s:{number}", nbytes=nbytes, ways=tuple(ways), maker=maker))
    total = num_layers * sum(slot.nbytes for slot in slots)
    return PlanProblem(
        groups=(
            LayerGroup(
                layers=tuple(range(num_layers)),
                slots=tuple(slots),
                steps=tuple(steps),
                sources=tuple(sources),
            ),
        ),
        forward_ms=rng.choice((0.0, 3.0, 10.0)),
        backward_ms=rng.choice((0.0, 5.0, 20.0)),
        gradient_ms=rng.choice((0.0, 4.0)),
        copy_engines=rng.choice((1, 2)),
        kept_bytes=rng.random() * total,
        host_bytes=rng.choice((float("inf"), rng.random() * total)),
    )


def least_overhead_ms(problem: PlanProblem) -> float | None:
    """Try every choice, layer by layer, without any of the solver's code; None if none holds."""
    (group,) = problem.groups
    paths = sorted({step.path for step in group.steps if step.is_product})
    best = None
    for num_allowed in range(len(paths) + 1):
        for allowed in itertools.combinations(paths, num_allowed):
            layer = list(_layer_choices(group, set(allowed)))
            for combined in itertools.combinations_with_replacement(layer, group.num_layers):
                cost = _cost(problem, combined)
                if cost is not None and (best is None or cost < best):
                    best = cost
    return best


def _layer_choices(group: LayerGroup, allowed: set[str]) -> Iterator[tuple[float, ...]]:
    """Yield (kept, host, offload ms, reload ms, forward ms, backward ms) of one layer."""
    per_slot = [
        ["keep", *range(len(slot.ways)), *(["rebuild"] if slot.maker is not None else [])]
        for slot in group.slots
    ]
    seen = set()
    for actions in itertools.product(*per_slot):
        makers = {
            slot.maker
            for slot, action in zip(group.slots, actions, strict=True)
            if action == "rebuild"
        }
        found = _runs(group, {m for m in makers if m is not None}, allowed)
        if found is None:
            continue
        runs, stored = found
        options = [["keep", *range(len(group.sources[n].ways))] for n in sorted(stored)]
        for places in itertools.product(*options):
            things = [
                *zip(group.slots, actions, strict=True),
                *zip((group.sources[n] for n in sorted(stored)), places, strict=True),
            ]
            kept = sum(thing.nbytes for thing, action in things if action == "keep")
            ways = [thing.ways[a] for thing, a in things if isinstance(a, int)]
            row = (
                kept,
                sum(way.host_bytes for way in ways),
                sum(way.offload_ms for way in ways),
                sum(way.reload_ms for way in ways),
                sum(way.forward_ms for way in ways),
                sum(way.backward_ms for way in ways) + sum(group.steps[n].elapsed_ms for n in runs),
            )
            if row not in seen:
                seen.add(row)
                yield row


def _runs(
    group: LayerGroup, wanted: set[int], allowed: set[str]
) -> tuple[set[int], set[int]] | None:
    """Return the operations that run and the sources that are stored; None if one may not run."""
    runs: set[int] = set()
    stored: set[int] = set()
    pending = list(wanted)
    while pending:
        number = pending.pop()
        if number in runs:
            continue
        step = group.steps[number]
        if step.is_product and step.path not in allowed:
            return None
        runs.add(number)
        pending += step.needs
        for source in step.sources:
            maker = group.sources[source].maker
            if maker is not None and group.steps[maker].path in allowed:
                pending.append(maker)
            else:
                stored.add(source)
    return runs, stored


def _cost(problem: PlanProblem, layers: tuple[tuple[float, ...], ...]) -> float | None:
    kept, host, offload, reload, forward, backward = (
        sum(part) for part in zip(*layers, strict=True)
    )
    if kept > problem.kept_bytes or host > problem.host_bytes:
        return None
    beside = problem.gradient_ms if problem.copy_engines == 1 else 0.0
    return (
        forward
        + backward
        + max(0.0, offload - problem.forward_ms - forward)
        + max(0.0, reload + beside - problem.backward_ms - backward)
    )


NUM_DRAWN = 400


@pytest.mark.parametrize("seeds", [range(start, NUM_DRAWN, 8) for start in range(8)])
def test_it_equals_brute_force(seeds: range) -> None:
    num_feasible = 0
    for seed in seeds:
        problem = draw_problem(seed)
        expected = least_overhead_ms(problem)
        if expected is None:
            with pytest.raises(InfeasibleError, match="on the device"):
                solve(problem)
            continue
        num_feasible += 1
        found = solve(problem, relative_gap=0.0)
        assert found.overhead_ms == pytest.approx(expected, abs=2e-5), seed
        assert bound_ms(problem) <= found.overhead_ms + 1e-4
        _check_holds(problem, found.groups[0])
    assert num_feasible > len(seeds) // 3


def _check_holds(problem: PlanProblem, choice: object) -> None:
    (group,) = problem.groups
    kept = host = 0
    for position, slot in enumerate(group.slots):
        ways = choice.offloaded[position]  # type: ignore[attr-defined]
        parts = (choice.kept[position], *ways, choice.rebuilt[position])  # type: ignore[attr-defined]
        assert sum(parts) == group.num_layers
        kept += choice.kept[position] * slot.nbytes  # type: ignore[attr-defined]
        host += sum(w.host_bytes * n for w, n in zip(slot.ways, ways, strict=True))
    for source, stored in zip(group.sources, choice.stored, strict=True):  # type: ignore[attr-defined]
        kept += stored[0] * source.nbytes
        host += sum(w.host_bytes * n for w, n in zip(source.ways, stored[1:], strict=True))
    assert kept <= problem.kept_bytes * (1 + 1e-9) + 1e-6
    assert host <= problem.host_bytes * (1 + 1e-9) + 1e-6


def test_eighty_layers_of_forty_slots_are_close_to_the_bound() -> None:
    problem = large_problem()
    found = solve(problem)
    plain_ms = problem.forward_ms + problem.backward_ms
    assert (plain_ms + found.overhead_ms) / (plain_ms + bound_ms(problem)) < 1.005


def test_what_is_rebuilt_and_what_leaves_is_spread_over_the_layers() -> None:
    problem = large_problem(num_layers=16, num_slots=6)
    choice = solve(problem)
    placed = place(problem, choice)
    for position, slot in enumerate(problem.groups[0].slots):
        actions = [placed[layer, slot.name].action for layer in range(16)]
        assert actions.count("recompute") == choice.groups[0].rebuilt[position]
        assert actions.count("offload") == sum(choice.groups[0].offloaded[position])
        assert actions.count("keep") == choice.groups[0].kept[position]


@pytest.mark.parametrize("number", [1, 2, 3, 7, 24, 80])
def test_every_beginning_of_the_order_is_spread(number: int) -> None:
    order = spread_order(number)
    assert sorted(order) == list(range(number))
    for end in range(2, number + 1):
        gaps = [b - a for a, b in itertools.pairwise(sorted(order[:end]))]
        assert max(gaps) <= 2 * number / end + 2


def test_lines_of_the_solver_do_not_show(capfd: pytest.CaptureFixture[str]) -> None:
    def prints() -> int:
        os.write(1, b"of another thread\n")
        ctypes.CDLL(None).puts(b"HighsMipSolverData::x y.run();")  # kept until it is flushed
        raise InterruptedError

    with pytest.raises(InterruptedError):
        optimal.without_lines_of_highs(prints)
    os.write(1, b"behind\n")
    assert capfd.readouterr().out == "of another thread\nbehind\n"
