"""The search for the fastest plan within a limit: variants of layers, and as few copies as fit.

A plan is a *rung* and a number. The rung says how many steps all layers together are up their
chains of variants (:mod:`~hf_pyao.plan.solve.chain`), spread evenly over the model. The number
says how many of the other slots leave: the largest first, each from the layer that has the least on
the link so far. Few leave, since fewer are never slower; how few is found by walks
(:mod:`hf_pyao.plan.predict`), which decide everything.

Sums tell which rungs may be fast. From these the search goes up and down the chain by half of the
layers, a quarter, ..., one. Then it tries a tighter window, no last layers that are kept, the first
layers first, and a lossy codec. Where nothing fits yet, what is nearer to fitting is better: at the
least memory the search needs that slope.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.plan.documents.plan import KEEP, OFFLOAD, RECOMPUTE
from hf_pyao.plan.solve.candidate import PLANNED, Candidate
from hf_pyao.plan.solve.chain import LayerChain, Variant
from hf_pyao.plan.solve.conditions import Conditions, chosen_slots
from hf_pyao.plan.solve.correction import ExpectedTimes
from hf_pyao.plan.solve.steering import (
    FREE,
    HALF,
    LESS_WINDOW,
    NEAR,
    NUM_FITS,
    NUM_STARTS,
    ROUGHLY,
    SHORT,
)
from hf_pyao.plan.solve.ways import Ways


@dataclass(frozen=True)
class Position:
    """Where the search is."""

    rung: int
    conditions: Conditions
    is_spread: bool = True
    """False: the first layers are further up the chain."""
    is_lossy: bool = False
    """Slots leave in a codec that loses something."""


class Search:
    """Looks for the fastest plan within one limit, over one link.

    Args:
        ways: makes the plans.
        limit_bytes: what the device may hold.
        plain: plans that fit. What is slower is not looked at.
        ratio: how many times as fast as given the link is.
        rung: where to start; None: where sums say.
        is_quick: look at the given window and codec alone.
    """

    def __init__(
        self,
        ways: Ways,
        limit_bytes: float,
        plain: Sequence[Candidate],
        ratio: float = 1.0,
        rung: int | None = None,
        *,
        is_quick: bool = False,
    ) -> None:
        self._ways = ways
        self._limit_bytes = limit_bytes
        self._ratio = ratio
        self._is_quick = is_quick
        self._stepper = ways.stepper
        self._slots = ways.program.slots
        self._chains = ways.chains
        self._most = sum(chain.num_steps for chain in self._chains)
        self._plain = min(plain, key=self._rank, default=None)
        self._best_ms = math.inf if self._plain is None else self._rank(self._plain)[0]
        self._kept = ways.kept.outcome
        self._fitted: dict[Position, Candidate | None] = {}
        self._nearest: dict[Position, tuple[float, Candidate]] = {}
        """Of positions where nothing fits: by how much the nearest plan does not."""
        self._bias: dict[Conditions, float] = {}
        """By how much the last walk's peak was above the sum of bytes."""
        self._starts = self._likely() if rung is None else [rung]
        self.rung = self._starts[0]
        """Where the best plan is."""

    def run(self) -> tuple[Candidate | None, Candidate | None]:
        """Return the fastest plan that loses nothing, and the fastest that does; None: none fits.

        Where a plan costs next to nothing, nothing else is tried.
        """
        given = self._ways.conditions
        here = self._climbed([Position(rung, given) for rung in self._starts])
        for change in () if self._is_quick else self._changes(given):
            if self._is_free():
                break
            share = HALF if self._fitted[here] is None else NEAR
            there = self._climbed([dataclasses.replace(here, **change)], share)
            here = min(here, there, key=self._order)
        self.rung = here.rung
        known = [*self.fitting, *([] if self._plain is None else [self._plain])]
        exact = min(known, key=self._rank, default=None)
        if self._is_quick or not self._ways.may_lose or self._is_free():
            return exact, None
        lossy = self._climbed([dataclasses.replace(here, is_lossy=True)], NEAR)
        return exact, self._fitted[lossy]

    @property
    def fitting(self) -> list[Candidate]:
        """Plans that fit, the best of each position."""
        return [each for each in self._fitted.values() if each is not None]

    @property
    def nearest(self) -> list[Candidate]:
        """Plans that do not fit, the nearest to fitting of each position."""
        return [candidate for _, candidate in self._nearest.values()]

    def _changes(self, given: Conditions) -> Iterator[dict[str, Any]]:
        """Yield what is tried of a position besides its rung, one after the other."""
        if given.window_bytes is not None and given.may_shrink_window:
            window_bytes = given.window_bytes // LESS_WINDOW
            yield {"conditions": dataclasses.replace(given, window_bytes=window_bytes)}
            if given.keep_last_layers and given.may_keep_fewer:
                fewer = dataclasses.replace(given, window_bytes=window_bytes, keep_last_layers=0)
                yield {"conditions": fewer}
        if self._most:
            yield {"is_spread": False}

    def _is_free(self) -> bool:
        return self._best_ms <= FREE * self._kept.step_ms_at(self._ratio)

    # ---- moves ---------------------------------------------------------------------------------

    def _climbed(self, starts: Sequence[Position], share: float = HALF) -> Position:
        """Return the best of *starts*, and of what steps up and down the chain lead to.

        Args:
            starts: positions.
            share: of the layers that the first step is of.
        """
        here = min(starts, key=self._order)
        step = int(share * max((len(chain.layers) for chain in self._chains), default=0))
        step = max(1, step) if self._most else 0
        while step:
            near = [
                dataclasses.replace(here, rung=rung)
                for rung in (here.rung - step, here.rung + step)
                if 0 <= rung <= self._most
            ]
            best = min([here, *near], key=self._order)
            step = step if self._order(best) < self._order(here) else step // 2
            here = best
        return here

    def _order(self, position: Position) -> tuple[float, float, int]:
        """Return what positions are compared by: time, or else bytes that are too many.

        Of equals that do not fit, higher up the chain more may.
        """
        found = self._fit(position)
        if found is not None:
            return *self._rank(found), 0
        nearest = self._nearest.get(position)
        return math.inf, math.inf if nearest is None else nearest[0], -position.rung

    def _rank(self, candidate: Candidate) -> tuple[float, int]:
        return candidate.rank(self._ratio)

    # ---- sums ----------------------------------------------------------------------------------

    def _likely(self) -> list[int]:
        """Return the rungs that sums find the fastest, of those half of the layers apart."""
        link, kept = self._ways.conditions.link, self._ways.kept
        spare = ExpectedTimes.of(kept.step, kept.timed)

        def summed_ms(rung: int) -> float:
            freed_bytes, again_ms = self._freed(rung)
            rest = max(0, int(kept.peak_bytes - self._limit_bytes - freed_bytes))
            rest = min(rest, sum(slot.link_bytes for slot in self._slots))
            out_ms, in_ms = (link.copy_ms(way, rest) / self._ratio for way in ("offload", "reload"))
            if link.copy_engines == 1:
                in_ms += link.copy_ms("reload", kept.timed.uploaded_bytes)
            forward_ms = max(0.0, out_ms - spare.forward_ms)
            return again_ms + forward_ms + max(0.0, in_ms - spare.backward_ms - again_ms)

        num_layers = max((len(chain.layers) for chain in self._chains), default=1)
        rungs = range(0, self._most + 1, max(1, num_layers // 2))
        return sorted(rungs, key=summed_ms)[:NUM_STARTS]

    def _freed(self, rung: int) -> tuple[int, float]:
        """Return the bytes that a rung frees, and what runs again for it, in ms."""
        freed_bytes, again_ms = 0, 0.0
        for chain in self._chains:
            whole, more = self._steps(chain, rung)
            for position, number in ((whole, len(chain.layers) - more), (whole + 1, more)):
                if number:
                    freed_bytes += number * chain.variants[position].freed_bytes
                    again_ms += number * chain.variants[position].again_ms
        return freed_bytes, again_ms

    def _steps(self, chain: LayerChain, rung: int) -> tuple[int, int]:
        """Return how many steps each layer is up its chain, and how many layers one step more."""
        return divmod(rung * chain.num_steps // max(1, self._most), len(chain.layers))

    # ---- plans ---------------------------------------------------------------------------------

    def _variants(self, position: Position) -> dict[int, Variant]:
        """Return the variant of each layer of which something is decided."""
        found: dict[int, Variant] = {}
        for chain in self._chains:
            num_layers = len(chain.layers)
            order = spread_order(num_layers) if position.is_spread else range(num_layers)
            whole, more = self._steps(chain, position.rung)
            for place, index in enumerate(order):
                found[chain.layers[index]] = chain.variants[whole + (place < more)]
        last = self._ways.program.num_layers - position.conditions.keep_last_layers
        for layer in range(self._ways.num_open_layers, last if found else 0):
            found[layer] = found[max(found)]  # the last ones, where they are not kept
        return found

    def _leaving(self, position: Position, variants: dict[int, Variant]) -> list[int]:
        """Return the slots that may leave, in the order in which they do."""
        if not position.conditions.may_offload:
            return []
        left: dict[int, list[int]] = {}
        for layer, variant in variants.items():
            numbers = chosen_slots(self._stepper, layer, position.conditions.min_bytes)
            numbers = [each for each in numbers if self._slots[each].name not in variant.drops]
            if numbers:
                left[layer] = sorted(numbers, key=lambda each: self._slots[each].nbytes)
        layers = sorted(left)
        heap = [(0, place, layers[index]) for place, index in enumerate(spread_order(len(layers)))]
        order = []
        while heap:
            load, place, layer = heap[0]
            number = left[layer].pop()
            order.append(number)
            if left[layer]:
                heapq.heapreplace(heap, (load + self._slots[number].link_bytes, place, layer))
            else:
                heapq.heappop(heap)
        return order

    def _fit(self, position: Position) -> Candidate | None:
        """Return the plan at *position* by which no more leave than must; None if none fits."""
        if position not in self._fitted:
            self._fitted[position] = None
            _, again_ms = self._freed(position.rung)
            least_ms = self._kept.timed.compute_ms + again_ms
            if least_ms <= ROUGHLY * self._best_ms:
                self._fitted[position] = found = self._fewest_leaving(position)
                if found is not None:
                    self._best_ms = min(self._best_ms, self._rank(found)[0])
        return self._fitted[position]

    def _fewest_leaving(self, position: Position) -> Candidate | None:
        variants = self._variants(position)
        order = self._leaving(position, variants)
        freed_bytes = sum(each.freed_bytes for each in variants.values())
        over = self._kept.peak_bytes - freed_bytes - self._limit_bytes
        number = self._after(order, 0, over + self._bias.get(position.conditions, 0))
        too_few, too_many = -1, len(order) + 1
        best: Candidate | None = None
        short_bytes = max(1.0, SHORT * self._limit_bytes)
        for _ in range(NUM_FITS):
            found = self._made(position, variants, order[:number])
            excess, host_excess = self._excess(found, short_bytes)
            short_bytes *= 2 if excess == short_bytes else 1
            left = sum(self._slots[each].nbytes for each in order[:number])
            self._bias[position.conditions] = excess + left - over
            if max(excess, host_excess) > 0:
                nearest = self._nearest.get(position)
                nbytes = max(0.0, excess) + max(0.0, host_excess)
                if nearest is None or nbytes < nearest[0]:
                    self._nearest[position] = nbytes, found
            if host_excess > 0:
                too_many = number
                excess = -host_excess
            elif excess > 0:
                too_few = number
                if self._rank(found)[0] > self._best_ms:
                    break  # it takes no less if more leaves
            else:
                too_many = number
                best = found if best is None else min(best, found, key=self._rank)
                if found.outcome.stall_ms_at(self._ratio) <= self._kept.stall_ms_at(self._ratio):
                    break  # nor if less leaves
            if too_many - too_few <= 1:
                break
            number = self._after(order, number, excess)
            number = min(max(number, too_few + 1), too_many - 1)
        return best

    def _after(self, order: Sequence[int], number: int, excess: float) -> int:
        """Return how many leave if *excess* bytes more leave than the first *number*."""
        while excess > 0 and number < len(order):
            excess -= self._slots[order[number]].nbytes
            number += 1
        while number > 0 and excess + self._slots[order[number - 1]].nbytes <= 0:
            number -= 1
            excess += self._slots[order[number]].nbytes
        return number

    def _excess(self, found: Candidate, short_bytes: float) -> tuple[float, float]:
        """Return by how many bytes a plan exceeds what device and host may hold.

        By *short_bytes* where the allocator cannot serve it though so much is not allocated.
        """
        limit_bytes = self._limit_bytes
        host_excess = found.host_bytes - self._ways.host_limit_bytes
        excess = found.peak_bytes - limit_bytes
        # The allocator is not asked about what will not be taken.
        is_asked = excess <= 0 >= host_excess and self._rank(found)[0] <= self._best_ms
        if is_asked and not found.memory.fits(limit_bytes):
            excess = short_bytes
        return excess, host_excess

    def _made(
        self, position: Position, variants: dict[int, Variant], leaving: Sequence[int]
    ) -> Candidate:
        """Return a plan."""
        actions = [KEEP] * len(self._slots)
        for number in leaving:
            actions[number] = OFFLOAD
        for layer, variant in variants.items():
            for number in chosen_slots(self._stepper, layer, position.conditions.min_bytes):
                if self._slots[number].name in variant.drops:
                    actions[number] = RECOMPUTE
        return self._ways.candidate(
            PLANNED,
            actions,
            frozenset().union(*(each.products for each in variants.values())),
            codecs=self._ways.lossy_codecs(leaving) if position.is_lossy else None,
            conditions=position.conditions,
        )


def spread_order(number: int) -> list[int]:
    """Return 0 to *number* - 1 in an order whose every beginning is spread evenly over them."""
    bits = max(1, (number - 1).bit_length())
    reversed_bits = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(2**bits))
    return [n for n in reversed_bits if n < number]
