"""Whether an attachment streams frozen weights, and how many layers stay on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from hf_pyao.auto.install.streaming_checks import StreamingSettings
from hf_pyao.auto.install.weights import StreamedLayers
from hf_pyao.engine.transfer.layout import has_storage
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.errors import ConfigError, warn
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.weights.streamable import slot_bytes, streamable_layers
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.weights.first_residents import (
    FREE_SHARE,
    device_bytes_of,
    first_residents,
    optimizer_bytes,
)

logger = logging.getLogger(__name__)


def streaming_of(
    model: nn.Module,
    found: FoundLayers,
    settings: StreamingSettings,
    link: LinkContext,
    device: torch.device,
    limit: DeviceLimit | None = None,
) -> StreamedLayers | None:
    """Return what streams the weights that ``PyAOConfig.stream_weights`` asks for; None for none.

    Args:
        model: the whole model, on the host or on the device.
        found: its layers.
        settings: how many layers stay.
        link: transport and host memory.
        device: where compute runs.
        limit: memory of the device; None: it is not known.

    Raises:
        ConfigError: as :class:`StreamedLayers`, or ``"auto"`` where no limit is known.
        ConflictError: as :class:`StreamedLayers`.
    """
    stream_weights, label = settings.value, settings.label
    if stream_weights == "off":
        return None
    if stream_weights == "auto" and limit is None and device.type != "cpu":
        raise ConfigError(
            f"{label} is 'auto', and how much memory {device} has is not known. Give "
            f"device_memory_gib, or for {label} a number of layers that stay, such as 0.",
            key="device-memory-unknown",
        )
    ends_leave = settings.embeddings == "on"
    if limit is not None:
        stream_weights, fits = _at_first(model, found, stream_weights, limit)
        ends_leave |= settings.embeddings == "auto" and not fits
    elif stream_weights == "auto" and not ends_leave:
        return None  # everything fits: the device is the host
    elif stream_weights == "auto":
        stream_weights = len(found.layers)
    assert isinstance(stream_weights, int)
    streamed = StreamedLayers(
        model,
        found,
        stream_weights,
        settings,
        link,
        device,
        ends_leave=ends_leave,
    )
    stay = streamed.num_resident - streamed.least_resident
    on_disk = streamed.memory.disk.placed
    if settings.value == "auto" and stay and on_disk is not None:
        warn(
            logger,
            "weights-keep-places",
            "%s is 'auto', and the weights of %d layers lie on the disk: those of %d others stay "
            "on the device for as long as the model is attached, since layers keep their places "
            "then. If memory runs out, give %s=0.",
            label,
            len(on_disk.layers),
            stay,
            label,
        )
    return streamed


def _at_first(
    model: nn.Module, found: FoundLayers, stream_weights: int | str, limit: DeviceLimit
) -> tuple[int, bool]:
    """Return how many layers stay until the first batch is known, and whether the device has room.

    A number that was given stays.
    """
    parameters = list(model.parameters())
    layers = streamable_layers(model, found.layers)
    sizes = [layer.nbytes for layer in layers]
    all_bytes = sum(map(_dense_bytes, (*parameters, *model.buffers())))
    gradient_bytes = sum(_dense_bytes(each) for each in parameters if each.requires_grad)
    other_bytes = all_bytes - sum(sizes) + gradient_bytes + optimizer_bytes(parameters)

    def largest_bytes(streamed: Sequence[int]) -> int:
        return slot_bytes([layers[number] for number in streamed])

    if not isinstance(stream_weights, int):
        stream_weights = first_residents(sizes, other_bytes, limit.nbytes, largest_bytes)
    needed_bytes = device_bytes_of(sizes, stream_weights, largest_bytes) + other_bytes
    return stream_weights, needed_bytes <= (1 - FREE_SHARE) * limit.nbytes


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if has_storage(tensor) else 0
