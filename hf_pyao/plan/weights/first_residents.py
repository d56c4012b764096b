"""How many layers' frozen weights stay on the device before anything is known of the batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    slot_bytes: int,
    other_bytes: float,
    limit_bytes: float,
    given: int | None = None,
) -> tuple[int, bool]:
    """Return how many layers stay, and whether they leave :data:`FREE_SHARE` of the device.

    Args:
        block_bytes: frozen weights of each layer.
        slot_bytes: of a slot of the ring, which takes the largest block.
        other_bytes: of the model, gradients and optimizer states: what is there in any case.
        limit_bytes: what the device may hold.
        given: the number, if it is not to be chosen: all if they leave so much, or the most.
    """
    room = (1 - FREE_SHARE) * limit_bytes - other_bytes
    num_layers = len(block_bytes)
    for number in range(num_layers, -1, -1) if given is None else (given,):
        stay = resident_layers(num_layers, number)
        nbytes = sum(block_bytes[layer] for layer in stay)
        if len(stay) < num_layers:
            nbytes += NUM_SLOTS * slot_bytes
        if nbytes <= room and (nbytes < sum(block_bytes) or number in (given, num_layers)):
            return number, True
    return given or 0, False
