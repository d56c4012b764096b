"""How many tokens a micro-batch needs for uploads to hide under compute."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.plan.hardware.speeds import GIB, DeviceModel, LinkModel
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, StepProgram
from hf_pyao.plan.step.streamed_step import block_bytes


def tokens_by_formula(bytes_per_parameter: float, device: DeviceModel, link: LinkModel) -> float:
    """Return the tokens whose matrix products take as long as the upload of their weights.

    A pass does two operations for each parameter and token, and reads each parameter once:
    ``bytes/parameter x FLOP/s / (2 x bytes/s of the link)``.

    Args:
        bytes_per_parameter: as the weights are stored.
        device: its arithmetic.
        link: its way to the device.
    """
    flop_per_s = device.tflop_per_s * 1e12
    return bytes_per_parameter * flop_per_s / (2 * link.h2d_gib_per_s * GIB)


def tokens_by_clock(
    program: StepProgram, times_ms: Sequence[float], link: LinkModel, num_tokens: int
) -> float:
    """Return the tokens at which no pass over a block takes less than its upload.

    What a pass takes is taken to grow in proportion to the tokens. It holds attention and all else
    that runs in the layer, and no second runs of it. A part of it (launches, reads of weights) does
    not grow, so that far above *num_tokens* more tokens are needed than this: 14 % more at eight
    times, for a Llama of width 1,024.

    Args:
        program: a step with all weights resident.
        times_ms: what each operation takes.
        link: its way to the device.
        num_tokens: of *program*.
    """
    sizes = block_bytes(program)
    passes = {(phase, layer): 0.0 for phase in (FORWARD, BACKWARD) for layer in range(len(sizes))}
    for segment in program.segments:
        if segment.layer >= 0:
            elapsed_ms = sum(times_ms[segment.start : segment.end])
            passes[segment.phase, segment.layer] += elapsed_ms
    return max(
        (
            num_tokens * link.copy_ms("reload", sizes[layer]) / elapsed_ms
            for (_, layer), elapsed_ms in passes.items()
            if sizes[layer] and elapsed_ms
        ),
        default=0.0,
    )
