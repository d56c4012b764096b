"""What a layer's replay holds in backward, and when it lets go: by arithmetic.

Follows ``hf_pyao/engine/recompute/replay.py``. A value that was rebuilt is held while an operation
that is still to run again reads it, or autograd still has a handle on it. What is stored for a
recipe is held until autograd has released every dropped slot that the recipe belongs to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_pyao.plan.step.layer_recipes import LayerRecipe, Making


class SlotMoments(NamedTuple):
    """When backward uses a slot, in operations of the step."""

    asked_at: int
    """Number of operations before it is first asked for; -1 if it is not."""
    released_at: int
    """The first operation at which autograd has no handle on it any more."""


class Replaying(NamedTuple):
    """An operation that runs again."""

    making: Making
    makes: tuple[int, ...]
    """Values that it allocates."""
    frees: tuple[int, ...]
    """Values that are let go when it is done."""


@dataclass
class LayerReplay:
    """The replay of one layer."""

    operations: dict[str, tuple[Replaying, ...]] = field(default_factory=dict)
    """What runs when a dropped slot is asked for, by slot."""
    made_at: dict[int, int] = field(default_factory=dict)
    """Values that are made again: number of operations of the step before that."""
    released_at: dict[int, int] = field(default_factory=dict)
    """Values that are made again: the first operation of the step without them, at the latest."""
    read_at: dict[int, int] = field(default_factory=dict)
    """Stored values that recipes end in: when the last dropped slot is released whose recipe
    does."""


def replay_layer(
    recipe: LayerRecipe, value_of: Mapping[str, int], moments: Mapping[str, SlotMoments]
) -> LayerReplay:
    """Return what the replay of a layer holds.

    Args:
        recipe: how what is dropped of the layer comes back.
        value_of: the value that each slot holds.
        moments: when backward uses each dropped slot.
    """
    return _Replay(recipe, value_of, moments).run()


class _Replay:
    def __init__(
        self, recipe: LayerRecipe, value_of: Mapping[str, int], moments: Mapping[str, SlotMoments]
    ) -> None:
        self.recipe = recipe
        self.value_of = value_of
        self.moments = moments
        self.found = LayerReplay()
        self.released_at = {value_of[name]: moments[name].released_at for name in recipe.reaches}
        """Values of dropped slots, and when autograd releases them."""
        self.uses: Counter[int] = Counter()
        """Operations still to run again that read a value."""
        for makings in (*recipe.order.values(), recipe.not_asked):
            for making in makings:
                self.uses.update(making.reads)
        self.live: dict[int, None] = {}
        """Values that are there again."""

    def run(self) -> LayerReplay:
        last_read: dict[int, int] = {}
        for name, values in self.recipe.reaches.items():
            for value in values:
                released_at = self.moments[name].released_at
                last_read[value] = max(last_read.get(value, -1), released_at)
        for name, makings in self.recipe.order.items():
            now = self.moments[name].asked_at
            self._forget_released(now)
            target = self.value_of[name]
            self.found.operations[name] = tuple(self._run(each, target, now) for each in makings)
        for value in self.live:
            is_read = self.uses[value] > 0
            is_slot = value in self.released_at
            last = self.released_at[value] if is_slot and not is_read else last_read[value]
            self.found.released_at[value] = last
        self.found.read_at = last_read
        return self.found

    def _forget_released(self, now: int) -> None:
        """Let go of what autograd has released by *now* and no operation will read."""
        for value in [*self.live]:
            released_at = self.released_at.get(value, math.inf)
            if released_at < now and self.uses[value] <= 0:
                del self.live[value]
                self.found.released_at[value] = int(released_at)

    def _run(self, making: Making, target: int, now: int) -> Replaying:
        makes = tuple(value for value in making.makes if value not in self.live)
        for value in makes:
            self.live[value] = None
            self.found.made_at[value] = now
        for value in making.reads:
            self.uses[value] -= 1
        done = [value for value in makes if value != target]
        done += [value for value in making.reads if value in self.live]
        frees = tuple(value for value in done if not self._is_needed(value, now))
        for value in frees:
            del self.live[value]
            self.found.released_at[value] = now
        return Replaying(making, makes, frees)

    def _is_needed(self, value: int, now: int) -> bool:
        return self.uses[value] > 0 or self.released_at.get(value, -1) >= now
