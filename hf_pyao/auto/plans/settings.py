"""``AutoSettings``: what policy ``auto`` takes from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_pyao.config import EffectiveConfig
from hf_pyao.plan.hardware.device_limit import DeviceLimit, device_limit
from hf_pyao.plan.options.plan_levers import GivenLevers
from hf_pyao.text import Labels


@dataclass(frozen=True, kw_only=True)
class AutoSettings:
    """Made once when a model is attached. What binds the planner is in its ``PlanRequest``."""

    given: GivenLevers
    """The levers, and which of them its plans may set."""
    profile_steps: int
    """Micro-batches that are measured before it decides."""
    layers: tuple[str, ...]
    """Names of the layers; empty: those that the architecture is known to have."""
    plan: str | None
    """File of the plan that is kept; None: none is."""
    makes_profile: bool
    """True if a profile is asked for as well."""
    recomputes: bool
    """True if parts of a layer are to be recomputed."""
    codec: str
    """Name of the codec that is given."""
    allow_lossy: bool
    """True if it may choose codecs that are not exact."""
    device_memory_gib: float | None
    """Most memory of the device, in GiB; None: what it has free."""
    labels: Labels = field(default_factory=Labels, compare=False)
    """By field of the configuration, how messages call it."""

    @classmethod
    def of(cls, config: EffectiveConfig, given: GivenLevers) -> AutoSettings:
        """Return what *config* holds of it, with the levers that are *given* in it."""
        return cls(
            given=given,
            profile_steps=config.profile_steps,
            layers=tuple(config.layers),
            plan=None if config.plan is None else str(config.plan),
            makes_profile=config.profile is not None,
            recomputes=bool(config.recompute_modules),
            codec=config.codec if isinstance(config.codec, str) else config.codec.name,
            allow_lossy=config.allow_lossy,
            device_memory_gib=config.device_memory_gib,
            labels=given.labels,
        )

    def device_limit(self, device: torch.device) -> DeviceLimit | None:
        """Return what plans may take of *device*; None if it has no limit."""
        return device_limit(device, self.device_memory_gib, self.label("device_memory_gib"))

    def label(self, name: str) -> str:
        """Return how messages call a field of the configuration."""
        return self.labels[name]
