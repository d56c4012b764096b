"""A recorded step with frozen weights streamed: what stays on the device, and which layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from hf_pyao.engine.transfer.ring_schedule import resident_layers
from hf_pyao.engine.weights.host_bytes import ALIGNMENT_BYTES
from hf_pyao.plan.step.step_program import OUTSIDE, Resident, StepProgram
from hf_pyao.plan.step.streamed_blocks import StreamedBlocks


def block_bytes(program: StepProgram) -> tuple[int, ...]:
    """Return what would be uploaded for each layer if it were streamed, alignment included.

    Args:
        program: a step with all weights resident.
    """
    found = [0] * program.num_layers
    for each in program.residents:
        if _is_streamable(each):
            found[each.layer] += -(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(found)


def with_streamed_blocks(program: StepProgram, layers: Collection[int]) -> StepProgram:
    """Return *program* with the blocks of *layers* streamed.

    Args:
        program: a step with all weights resident.
        layers: positions of layers; those without frozen weights are left out.

    Raises:
        ValueError: something is streamed already.
    """
    if program.streamed:
        raise ValueError("the step has streamed blocks already; expected one with all resident.")
    sizes = block_bytes(program)
    streamed = StreamedBlocks(
        tuple(nbytes if layer in layers else 0 for layer, nbytes in enumerate(sizes))
    )
    if not streamed:
        return program
    kept = [
        each for each in program.residents if not (_is_streamable(each) and each.layer in streamed)
    ]
    gone_bytes = sum(each.nbytes for each in program.residents) - sum(each.nbytes for each in kept)
    ring = [Resident(OUTSIDE, streamed.slot_bytes, is_streamable=True)] * streamed.num_slots
    return dataclasses.replace(
        program,
        residents=(*ring, *kept),
        resident_bytes=program.resident_bytes - gone_bytes + streamed.device_bytes,
        streamed=streamed,
    )


def streamed_layers(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Return which layers are streamed if *num_streamed* are: the others are spread evenly."""
    stay = resident_layers(num_layers, num_layers - num_streamed) if num_streamed else ()
    if num_streamed >= num_layers:
        return tuple(range(num_layers))
    return tuple(layer for layer in range(num_layers) if layer not in stay) if num_streamed else ()


def _is_streamable(resident: Resident) -> bool:
    """Say whether a weight may be streamed: one of a layer that is not tied with another."""
    return resident.is_streamable and resident.layer != OUTSIDE and resident.num_names == 1
