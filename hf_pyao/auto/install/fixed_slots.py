"""``FixedSlots``: slots that ``recompute_modules`` and ``keep_last_layers`` decide on."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.config import EffectiveConfig
from hf_pyao.engine.runtime.policy import (
    POINTWISE,
    KeepLastLayers,
    Policy,
    RecomputeSelected,
    Selection,
)
from hf_pyao.levers import Levers
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.module_roles import resolve_selections
from hf_pyao.text import Labels


@dataclass(frozen=True, kw_only=True)
class FixedSettings:
    """Which slots no policy decides on."""

    recompute_modules: tuple[str, ...]
    """Names of sub-modules that are recomputed, and ``"pointwise"``."""
    keep_last_layers: int = 0
    """How many last layers are kept; segments round it up."""
    label: str = "recompute_modules"
    """How messages call *recompute_modules*."""

    @classmethod
    def of(cls, config: EffectiveConfig, labels: Labels) -> FixedSettings:
        """Return what *config* says; messages call its fields by *labels*."""
        return cls(
            recompute_modules=tuple(config.recompute_modules),
            keep_last_layers=config.keep_last_layers,
            label=labels["recompute_modules"],
        )


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
    def of(cls, found: FoundLayers, settings: FixedSettings, levers: Levers) -> FixedSlots:
        """Return those of a model.

        Args:
            found: the model's layers.
            settings: which they are.
            levers: the segments.

        Raises:
            ConfigError: a module to recompute is in no layer.
        """
        recompute = settings.recompute_modules
        modules = [name for name in recompute if name != POINTWISE]
        num_layers = len(found.layers)
        first_kept = num_layers - levers.kept_layers(num_layers, settings.keep_last_layers)
        return cls(
            selected=resolve_selections(modules, found, field=settings.label, also=(POINTWISE,)),
            is_pointwise=POINTWISE in recompute,
            first_kept=first_kept if settings.keep_last_layers else None,
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
