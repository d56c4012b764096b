"""``FixedSlots``: of ``recompute_modules`` and ``keep_last_layers``; policies decide on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.engine.runtime.policy import (
    POINTWISE,
    KeepLastLayers,
    Policy,
    RecomputeSelected,
    Selection,
)
from hf_pyao.levers import Levers
from hf_pyao.model.map.module_map import FoundLayers, resolve_selections


@dataclass(frozen=True)
class FixedSlots:
    """What is recomputed and what is kept in one model, whatever the policy decides."""

    selected: Selection
    """By layer, the sub-modules whose slots are recomputed."""
    is_pointwise: bool
    """True if the results of pointwise operations are recomputed."""
    first_kept: int | None
    """Index of the first of the last layers that are kept; None: none is."""

    @classmethod
    def of(
        cls,
        found: FoundLayers,
        recompute_modules: Sequence[str],
        keep_last_layers: int,
        levers: Levers,
        *,
        label: str = "recompute_modules",
    ) -> FixedSlots:
        """Return those of a model.

        Args:
            found: the model's layers.
            recompute_modules: names of sub-modules, and ``"pointwise"``.
            keep_last_layers: how many layers are kept; segments round it up.
            levers: the segments.
            label: how messages call *recompute_modules*.

        Raises:
            ConfigError: a module to recompute is in no layer.
        """
        modules = [name for name in recompute_modules if name != POINTWISE]
        num_layers = len(found.layers)
        first_kept = num_layers - levers.kept_layers(num_layers, keep_last_layers)
        return cls(
            selected=resolve_selections(modules, found, field=label, also=(POINTWISE,)),
            is_pointwise=POINTWISE in recompute_modules,
            first_kept=first_kept if keep_last_layers else None,
        )

    @property
    def recomputes(self) -> bool:
        """True if something is recomputed."""
        return self.is_pointwise or bool(self.recomputed_paths)

    @property
    def recomputed_paths(self) -> tuple[str, ...]:
        """What is recomputed in a layer: paths of sub-modules, and ``"pointwise"``."""
        paths = {path for each in self.selected.values() for path in each}
        return (*sorted(paths), *((POINTWISE,) if self.is_pointwise else ()))

    def around(self, policy: Policy) -> Policy:
        """Return *policy*, which decides on the other slots alone."""
        if self.recomputes:
            policy = RecomputeSelected(policy, self.selected, is_pointwise=self.is_pointwise)
        if self.first_kept is not None:
            policy = KeepLastLayers(policy, self.first_kept)
        return policy
