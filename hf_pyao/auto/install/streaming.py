"""Whether an attachment streams frozen weights, and how many layers stay on the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.errors import ConfigError
from hf_pyao.model.map.module_map import FoundLayers
from hf_pyao.plan.documents.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StreamingSettings:
    """Whether frozen weights are streamed."""

    value: int | str
    """``"off"``, ``"auto"``, or how many layers stay on the device."""
    label: str
    """How messages call the field."""

    @classmethod
    def of(cls, config: PyAOConfig) -> StreamingSettings:
        """Return what *config* says."""
        return cls(value=config.stream_weights, label=config.label("stream_weights"))

    def as_planned(self, plan: Plan | None) -> StreamingSettings:
        """Return the same with the layers that stay under *plan*, where that was left to it."""
        if self.value != "auto" or plan is None or plan.facts.resident_blocks is None:
            return self
        return dataclasses.replace(self, value=plan.facts.resident_blocks)


def streaming_of(
    model: nn.Module,
    found: FoundLayers,
    settings: StreamingSettings,
    link: LinkContext,
    device: torch.device,
) -> StreamedLayers | None:
    """Return what streams the weights that ``PyAOConfig.stream_weights`` asks for; None for none.

    Raises:
        ConfigError: as :class:`StreamedLayers`.
        ConflictError: as :class:`StreamedLayers`.
    """
    stream_weights, label = settings.value, settings.label
    if stream_weights == "off":
        return None
    if stream_weights == "auto":
        if device.type == "cpu":
            return None  # everything fits: the device is the host
        raise ConfigError(
            f"{label} is 'auto', and no plan says how many layers stay. Give a plan that does "
            "(`pyao plan MODEL --lora --stream-weights auto --save plan.json`, policy 'plan'), a "
            "number of layers, such as 0, or 'off'."
        )
    assert isinstance(stream_weights, int)
    layers = StreamedLayers(model, found, stream_weights, label, link, device)
    return layers if layers.blocks else None
