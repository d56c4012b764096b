"""How many layers' frozen weights stay on the device before anything is known of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from hf_pyao.engine.transfer.ring_schedule import NUM_SLOTS, resident_layers

FREE_SHARE = 0.3
"""Share of the device that is left for the step: activations, logits, what kernels allocate."""

MOMENTS = 2
"""Optimizer states of a trained parameter, as large as it is: those of Adam."""


def optimizer_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return what an Adam's states of the trained parameters take on the device."""
    return sum(MOMENTS * each.nbytes for each in parameters if each.requires_grad)


def first_residents(
    block_bytes: Sequence[int],
    other_bytes: float,
    limit_bytes: float,
    largest_bytes: Callable[[Sequence[int]], int] | None = None,
) -> int:
    """Return how many layers stay: all if they leave :data:`FREE_SHARE` of the device, or fewer.

    Args:
        block_bytes: frozen weights of each layer.
        other_bytes: of the model, gradients and optimizer states: what is there in any case.
        limit_bytes: what the device may hold.
        largest_bytes: returns the largest block of these layers, by position, where a layer may
            have several; None: a layer is one block.
    """
    room = (1 - FREE_SHARE) * limit_bytes - other_bytes
    num_layers = len(block_bytes)
    if sum(block_bytes) <= room:
        return num_layers
    for number in range(num_layers - 1, 0, -1):
        device_bytes = device_bytes_of(block_bytes, number, largest_bytes)
        if device_bytes <= room and device_bytes < sum(block_bytes):
            return number
    return 0


def device_bytes_of(
    block_bytes: Sequence[int],
    num_resident: int,
    largest_bytes: Callable[[Sequence[int]], int] | None = None,
) -> int:
    """Return what the layers' frozen weights take of the device, slots of the ring included.

    Args:
        block_bytes: as for :func:`first_residents`.
        num_resident: layers whose weights stay.
        largest_bytes: as for :func:`first_residents`.
    """
    num_layers = len(block_bytes)
    stay = resident_layers(num_layers, num_resident)
    streamed = [layer for layer in range(num_layers) if layer not in stay]
    sizes = [block_bytes[layer] for layer in streamed]
    slot_bytes = max(sizes, default=0) if largest_bytes is None else largest_bytes(streamed)
    return int(sum(block_bytes) - sum(sizes) + NUM_SLOTS * slot_bytes)
