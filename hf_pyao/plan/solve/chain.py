"""The variants in which a layer may run: each drops what the one before drops, and more.

The chain is greedy: next comes what frees most bytes for the milliseconds that run again. What a
drop frees besides, since the same operations make it, is dropped with it. So few variants are
left that a plan is only a number of steps up the chain, and how many of the rest leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_pyao.plan.solve.conditions import Conditions, chosen_slots, equal_layers
from hf_pyao.plan.solve.steering import SMALL_VARIANT
from hf_pyao.plan.step.layer_graph import PARAMETER
from hf_pyao.plan.step.layer_recipes import Making, RecipeSearch
from hf_pyao.plan.step.planned_step import StepPlanner

IsForced = Callable[[str], bool]
"""Says of a slot, by name, that it is recomputed if it can be."""


@dataclass(frozen=True)
class Variant:
    """A way in which a layer runs."""

    drops: frozenset[str] = frozenset()
    """Slots that are made again in backward."""
    products: frozenset[str] = frozenset()
    """Sub-modules whose matrix products and attention run again for that."""
    freed_bytes: int = 0
    again_ms: float = 0.0


PLAIN = Variant()
"""Nothing runs again."""


def chain_of(
    planner: StepPlanner,
    layer: int,
    *,
    min_bytes: int,
    may_recompute: bool = True,
    is_forced: IsForced | None = None,
) -> list[Variant]:
    """Return the variants of a layer, from the one that drops least.

    Args:
        planner: has the step.
        layer: its position.
        min_bytes: smaller slots stay.
        may_recompute: whether anything may run again.
        is_forced: says what every variant drops, if it can be made again; None: nothing.
    """
    if planner.search is None or not may_recompute:
        return [PLAIN]
    slots = {
        planner.program.slots[number].name: planner.program.slots[number].nbytes
        for number in chosen_slots(planner, layer, min_bytes)
    }
    state = _State(planner, planner.search, layer, slots)
    for name in slots:
        if is_forced is not None and is_forced(name) and name not in state.drops:
            state = next(state.with_dropped(name), state)
    chain = [state.variant()]
    least_bytes = SMALL_VARIANT * sum(slots.values())
    while True:
        further = [each for name in slots for each in state.with_dropped(name)]
        best = max(further, key=lambda each: each.rate_after(state), default=None)
        if best is None or best.freed_bytes <= state.freed_bytes:
            break
        state = best
        chain.append(state.variant())
    kept = chain[:1]
    for number, variant in enumerate(chain[1:], 2):
        is_last = number == len(chain)
        if is_last or variant.freed_bytes - kept[-1].freed_bytes >= least_bytes:
            kept.append(variant)
    return kept


class _State:
    """What is dropped of a layer so far, what runs again for it, and what is stored for it."""

    def __init__(
        self,
        planner: StepPlanner,
        search: RecipeSearch,
        layer: int,
        slots: dict[str, int],
        runs: frozenset[Making] = frozenset(),
        stored: frozenset[int] = frozenset(),
    ) -> None:
        self._planner, self._search, self._layer, self._slots = planner, search, layer, slots
        self._runs = runs
        # Whatever has a slot is there in backward: kept, brought back, or made again itself.
        names = {planner.program.slots[number].name for number in planner.slots_of(layer)}
        self._saved = {value for name, value in search.value_of.items() if name in names}
        self._stored = frozenset(value for value in stored if search.maker(value) not in runs)
        self.drops = frozenset(name for name in slots if self._maker(name) in runs)
        self.again_ms = sum(planner.operation_ms(making.number, layer) for making in runs)
        self.freed_bytes = sum(slots[name] for name in self.drops) - sum(
            planner.nbytes_of(layer, value) for value in self._stored
        )

    def variant(self) -> Variant:
        """Return it as what a plan takes."""
        products = frozenset(making.path for making in self._runs if making.is_product)
        return Variant(self.drops, products, self.freed_bytes, self.again_ms)

    def rate_after(self, before: _State) -> float:
        """Return the bytes that are freed more than *before*, for each ms that runs again more."""
        more_ms = max(self.again_ms - before.again_ms, 1e-9)
        return (self.freed_bytes - before.freed_bytes) / more_ms

    def with_dropped(self, name: str) -> Iterator[_State]:
        """Yield the states in which *name* is dropped too.

        First with the results of products stored, and then with these made again as well.
        """
        making = self._maker(name)
        for is_remade in (False, True) if making is not None and making not in self._runs else ():
            runs, stored = set(self._runs), set(self._stored)
            pending = [making]
            while pending:
                each = pending.pop()
                if each is None or each in runs:
                    continue
                runs.add(each)
                for read in each.reads:
                    maker = self._search.maker(read)
                    if self._is_there(read):
                        continue
                    if maker is not None and (is_remade or not maker.is_product or maker in runs):
                        pending.append(maker)
                    else:
                        stored.add(read)
            yield _State(
                self._planner,
                self._search,
                self._layer,
                self._slots,
                frozenset(runs),
                frozenset(stored),
            )

    def _maker(self, name: str) -> Making | None:
        value = self._search.value_of.get(name)
        return None if value is None else self._search.maker(value)

    def _is_there(self, value: int) -> bool:
        search = self._search
        is_parameter = search.graph.values[value].origin == PARAMETER
        return value in self._saved or value in search.shared or is_parameter


@dataclass(frozen=True)
class LayerChain:
    """Layers that save the same, and the variants in which each of them may run."""

    layers: tuple[int, ...]
    variants: Sequence[Variant]

    @property
    def num_steps(self) -> int:
        """Steps up the chain of all layers together."""
        return len(self.layers) * (len(self.variants) - 1)


def chains_of(
    planner: StepPlanner, conditions: Conditions, is_forced: IsForced | None
) -> list[LayerChain]:
    """Return the chains of a step's layers, without the last ones that are kept."""
    num_layers = planner.program.num_layers - conditions.keep_last_layers
    return [
        LayerChain(
            layers,
            chain_of(
                planner,
                layers[len(layers) // 2],
                min_bytes=conditions.min_bytes,
                may_recompute=conditions.may_recompute,
                is_forced=is_forced,
            ),
        )
        for layers in equal_layers(planner, conditions.min_bytes, num_layers)
    ]
