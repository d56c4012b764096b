"""Measures an attached model's micro-batches, for a profile that is asked for and for plans."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.profiling import ProfileSettings, ProfileWriter
from hf_pyao.config import SETTINGS, EffectiveConfig
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.model_identity import identity_of
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import class_name
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.run import check_report_path
from hf_pyao.text import Labels
from hf_pyao.training_engines import compiled_part

MOST_BARE = 3
"""Most micro-batches that are timed bare with everything offloaded: the first is not counted."""


class ProfileListener(Protocol):
    """Plans from profiles: policy ``auto``."""

    def profiled(self, profile: Profile | None) -> None:
        """Take the profile; None: none could be made. Called before a forward."""
        ...

    def measured_nothing(self) -> None:
        """Report that nothing was copied, and that it is measured again."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeasuringSettings:
    """What is measured, and the profile that is asked for."""

    path: str | None
    """File of the profile; None: none is asked for."""
    label: str
    """How messages call it."""
    num_micro_batches: int
    """How many are measured: for a profile, or by policy ``auto`` or ``pyao``."""
    layers: tuple[str, ...]
    """Names of the layers; empty: those that the architecture is known to have."""
    layers_label: str
    """How messages call them."""
    in_force: Mapping[str, Any]
    """All fields of the configuration as they are in force, for a profile to hold."""

    @classmethod
    def of(cls, config: EffectiveConfig, labels: Labels) -> MeasuringSettings:
        """Return what *config* says; messages call its fields by *labels*."""
        return cls(
            path=None if config.profile is None else str(config.profile),
            label=labels["profile"],
            num_micro_batches=config.profile_steps,
            layers=tuple(config.layers),
            layers_label=labels["layers"],
            in_force=config.to_dict(),
        )


class Measuring:
    """Has micro-batches measured; one profile after the other, or beside each other.

    Args:
        engine: what is measured.
        link: the engine's.
        device: where the model is.
        settings: what is measured, and the profile that is asked for.
        switch: knows with which levers the model runs.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        link: LinkContext,
        device: torch.device,
        settings: MeasuringSettings,
        switch: LeverSwitch,
    ) -> None:
        self._engine = engine
        self._link = link
        self._device = device
        self._settings = settings
        self._switch = switch
        self._listener: weakref.ref[ProfileListener] | None = None
        self._started: tuple[weakref.ref[nn.Module], weakref.ref[Any]] | None = None
        self._others: list[ProfileWriter] = []
        self.writer: ProfileWriter | None = None
        """What measures now, or measured last; None before."""

    @property
    def is_measuring(self) -> bool:
        """True while a profile is made."""
        return self.writer is not None and not self.writer.is_complete

    def prepare(
        self,
        model: nn.Module,
        found: FoundLayers,
        identity: Mapping[str, Any],
        for_plans: ProfileListener | None,
    ) -> None:
        """Make ready to measure from :meth:`start` on; *for_plans* is told of the profile.

        Raises:
            ConfigError: no profile can be written to the path that was given.
            ReportError: a profile that is there already cannot be read.
        """
        check_report_path(self._settings.path, self._settings.label)
        path, steps = self._settings.path, self._settings.num_micro_batches
        asked = self._asked(path, num_profiled(steps) if path is None else steps)
        self.writer = self._writer(model, found, asked, identity, for_plans)

    def start(
        self, model: nn.Module, owner: object, for_plans: ProfileListener | None = None
    ) -> None:
        """Measure what was prepared, and afterwards whatever *for_plans* asks for."""
        self._started = weakref.ref(model), weakref.ref(owner)
        # It owns this: [Note: Who owns whom] in `weak_calls`.
        self._listener = None if for_plans is None else weakref.ref(for_plans)
        if self.writer is not None:
            self.writer.start(model, owner)

    def measure_anew(self) -> None:
        """Measure the next micro-batches for a plan. A profile that the user asked for goes on."""
        if self._started is None:
            return  # prepared as it was attached
        model, owner = (ref() for ref in self._started)
        listener = None if self._listener is None else self._listener()
        if model is None or owner is None or listener is None:
            return
        settings = self._settings
        found = find_layers(model, settings.layers, field=settings.layers_label)
        asked = self._asked(None, num_profiled(settings.num_micro_batches))
        writer = self._writer(model, found, asked, identity_of(found), listener)
        if self.writer is not None and not self.writer.is_complete:
            self._others.append(self.writer)
        self.writer = writer
        writer.start(model, owner)

    def cancel(self) -> None:
        """Stop measuring for plans."""
        if self.writer is not None:
            self.writer.cancel()

    def measure(
        self,
        model: nn.Module,
        found: FoundLayers,
        owner: object,
        path: str | os.PathLike[str],
        num_micro_batches: int,
    ) -> None:
        """Measure the next micro-batches, and write their profile.

        Raises:
            ReportError: there is a file already that is no profile of this model.
        """
        label = self._settings.label
        path = SETTINGS["profile"].kind.check(label, path)
        num_micro_batches = SETTINGS["profile_steps"].kind.check("profile_steps", num_micro_batches)
        check_report_path(path, label)
        asked = self._asked(path, num_micro_batches)
        self.writer = self._writer(model, found, asked, identity_of(found), None)
        self.writer.start(model, owner)

    def end(self) -> None:
        """Take everything off. Twice is fine."""
        if self.writer is not None:
            self.writer.end()
        for writer in self._others:
            writer.end()

    def _asked(
        self, path: str | os.PathLike[str] | None, num_micro_batches: int
    ) -> ProfileSettings:
        levers = self._switch.levers  # as it runs: a plan may have set others than were given
        return ProfileSettings(
            path=None if path is None else os.fspath(path),
            num_micro_batches=num_micro_batches,
            layers=self._settings.layers,
            levers=levers,
            settings={**self._settings.in_force, **levers.settings()},
        )

    def _writer(
        self,
        model: nn.Module,
        found: FoundLayers,
        asked: ProfileSettings,
        identity: Mapping[str, Any],
        for_plans: ProfileListener | None,
    ) -> ProfileWriter:
        return ProfileWriter(
            self._engine,
            self._link,
            self._device,
            asked,
            title=f"{class_name(model)} on {self._device.type}",
            identity=identity,
            layer_names=[fqn for fqn, _ in found.layers],
            has_compiled_layers=any(compiled_part(layer) is not None for _, layer in found.layers),
            on_done=None if for_plans is None else weakly(for_plans.profiled, None),
            on_again=None if for_plans is None else weakly(for_plans.measured_nothing, None),
        )


def num_profiled(profile_steps: int) -> int:
    """Return how many of ``profile_steps`` micro-batches policy ``auto`` profiles."""
    return max(1, profile_steps - num_bare(profile_steps))


def num_bare(profile_steps: int) -> int:
    """Return how many micro-batches are timed without the profiler, before there is a plan.

    The profiler's marks at every module and tensor take time, which a plan does not pay when it is
    timed. What it is compared with must not pay it either.
    """
    return max(1, min(MOST_BARE, profile_steps // 2))
