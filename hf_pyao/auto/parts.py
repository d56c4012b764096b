"""``Parts``: what each part of an attachment takes from the configuration, made once by ``attach``.

No part gets the whole configuration. What a part reads is a class beside it with a function ``of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.auto.install.fixed_slots import FixedSettings
from hf_pyao.auto.install.links import LinkSettings
from hf_pyao.auto.install.streaming_checks import StreamingSettings
from hf_pyao.auto.measuring import MeasuringSettings
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.retry.failure_message import Remedies
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
    fixed: FixedSettings
    """What is recomputed and kept, whatever the policy decides."""
    codec: str | Codec
    """How tensors are written on the host, where the policy does not say."""
    verify_recompute: str
    """How often second runs are compared with first ones."""
    measuring: MeasuringSettings
    auto: AutoSettings
    """What policy ``auto`` takes."""
    binds: PlanRequest
    """What binds the plans of policy ``auto``, as far as the configuration says it."""
    remedies: Remedies
    """What a message may advise to change where a micro-batch does not fit."""


def parts_of(config: PyAOConfig) -> Parts:
    """Return the parts of *config*."""
    effective, labels = config.effective(), config.all_labels()
    levers = GivenLevers.of(config)
    return Parts(
        layers=Names(names=tuple(effective.layers), label=labels["layers"]),
        link=LinkSettings.of(effective, labels),
        streaming=StreamingSettings.of(effective),
        levers=levers,
        policy=PolicySettings.of(effective),
        modules=Names(names=tuple(effective.modules), label=labels["modules"]),
        fixed=FixedSettings.of(effective, labels),
        codec=effective.codec,
        verify_recompute=effective.verify_recompute,
        measuring=MeasuringSettings.of(effective, labels),
        auto=AutoSettings.of(effective, levers),
        binds=PlanRequest.of_config(config, levers=levers),
        remedies=Remedies.of(effective, labels),
    )
