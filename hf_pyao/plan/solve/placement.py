"""Chooses the layers for a decision that is made for a number of layers: spread evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.solve.plan_problem import GroupChoice, LayerGroup, PlanChoice, PlanProblem


@dataclass(frozen=True)
class Placed:
    """What becomes of a slot in one layer."""

    action: str
    """``keep``, ``offload`` or ``recompute``."""
    codec: str | None = None


def place(problem: PlanProblem, choice: PlanChoice) -> dict[tuple[int, str], Placed]:
    """Return, by layer and slot, what becomes of it."""
    found: dict[tuple[int, str], Placed] = {}
    for group, chosen in zip(problem.groups, choice.groups, strict=True):
        found |= _place_group(group, chosen)
    return found


def _place_group(group: LayerGroup, choice: GroupChoice) -> dict[tuple[int, str], Placed]:
    order = spread_order(group.num_layers)
    found: dict[tuple[int, str], Placed] = {}
    load_ms = [0.0] * group.num_layers
    """What each layer has on the link so far."""
    # Largest first, so that smaller ones even out what those left uneven.
    positions = sorted(range(len(group.slots)), key=lambda n: -group.slots[n].nbytes)
    for position in positions:
        slot = group.slots[position]
        name = slot.name
        rebuilt = order[: choice.rebuilt[position]]  # the same layers for all that hang together
        for index in rebuilt:
            found[group.layers[index], name] = Placed(RECOMPUTE)
        rest = [index for index in range(group.num_layers) if index not in rebuilt]
        for way, number in zip(slot.ways, choice.offloaded[position], strict=True):
            taken = _least_loaded(rest, number, load_ms, order)
            for index in taken:
                load_ms[index] += way.offload_ms
                found[group.layers[index], name] = Placed(OFFLOAD, way.codec)
            rest = [index for index in rest if index not in taken]
        for index in rest:
            found[group.layers[index], name] = Placed(KEEP)
    return found


def _least_loaded(
    layers: Sequence[int], number: int, load_ms: Sequence[float], order: Sequence[int]
) -> list[int]:
    """Return *number* of *layers* that have the least to copy yet, evenly spread."""
    rank = {index: n for n, index in enumerate(order)}
    return sorted(layers, key=lambda index: (round(load_ms[index], 6), rank[index]))[:number]


def spread_order(number: int) -> list[int]:
    """Return 0 to *number* - 1 in an order whose every beginning is spread evenly over them."""
    bits = max(1, (number - 1).bit_length())
    reversed_bits = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(2**bits))
    return [n for n in reversed_bits if n < number]
