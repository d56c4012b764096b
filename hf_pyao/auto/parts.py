"""``Parts``: what each part of an attachment takes from the configuration, made once by ``attach``.

No part gets the whole configuration: a field that a part reads is named here, and in the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.retry.memory_failure import Remedies
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.codecs import Codec
from hf_pyao.plan.options.plan_levers import GivenLevers
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.policies.by_name import PolicySettings


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of layers, or of sub-modules of a layer, that were given."""

    names: Sequence[str]
    label: str
    """How messages call the field that they are from."""


@dataclass(frozen=True, kw_only=True)
class FileToWrite:
    """A file that is asked for."""

    path: str | None
    """None: it is not."""
    label: str
    """How messages call the field that it is from."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How much is in flight and on the host."""

    window: int | str
    """Bound on bytes in flight, or ``"layer"``: compute and copies meet at each layer's end."""
    label: str
    """How messages call the window."""
    host_memory_gib: float | None
    """Most memory of the host, in GiB; None: its share of what is available."""

    @property
    def window_bytes(self) -> int | None:
        """The bound on bytes in flight; None for ``"layer"``."""
        return None if isinstance(self.window, str) else self.window


@dataclass(frozen=True, kw_only=True)
class StreamingSettings:
    """Whether frozen weights are streamed."""

    value: int | str
    """``"off"``, ``"auto"``, or how many layers stay on the device."""
    label: str
    """How messages call the field."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an attachment is made of."""

    layers: Names
    """The layers; empty: those that the architecture is known to have."""
    link: LinkSettings
    streaming: StreamingSettings
    levers: GivenLevers
    """What changes the step itself."""
    policy: PolicySettings
    modules: Names
    """What policy ``modules`` offloads."""
    recompute: Names
    """What is recomputed, whatever the policy decides."""
    keep_last_layers: int
    """How many last layers are kept, whatever the policy decides."""
    codec: str | Codec
    """How tensors are written on the host, where the policy does not say."""
    verify_recompute: str
    """How often second runs are compared with first ones."""
    profile: FileToWrite
    profile_steps: int
    """Micro-batches that are measured: for a profile, or by policy ``auto`` or ``pyao``."""
    in_force: Mapping[str, Any]
    """All fields as they are in force, for a profile to hold."""
    report: FileToWrite
    auto: AutoSettings
    """What policy ``auto`` takes."""
    binds: PlanRequest
    """What binds the plans of policy ``auto``, as far as the configuration says it."""
    remedies: Remedies
    """What a message may advise to change where a micro-batch does not fit."""


def parts_of(config: PyAOConfig) -> Parts:
    """Return the parts of *config*."""
    effective = config.effective()

    def names(field: str, given: Sequence[str]) -> Names:
        return Names(names=tuple(given), label=config.label(field))

    return Parts(
        layers=names("layers", config.layers),
        link=LinkSettings(
            window=effective.window,
            label=config.label("window"),
            host_memory_gib=config.host_memory_gib,
        ),
        streaming=StreamingSettings(
            value=config.stream_weights, label=config.label("stream_weights")
        ),
        levers=GivenLevers.of(config),
        policy=PolicySettings.of(config),
        modules=names("modules", config.modules),
        recompute=names("recompute_modules", config.recompute_modules),
        keep_last_layers=effective.keep_last_layers,
        codec=config.codec,
        verify_recompute=config.verify_recompute,
        profile=_file(config.profile, config.label("profile")),
        profile_steps=config.profile_steps,
        in_force=effective.to_dict(),
        report=_file(config.report, config.label("report")),
        auto=AutoSettings.of(config),
        binds=PlanRequest.of_config(config),
        remedies=Remedies.of(config),
    )


def _file(path: Any, label: str) -> FileToWrite:
    return FileToWrite(path=None if path is None else str(path), label=label)
