"""Copies under which compute stands still: where the host is the device, as on a CPU."""

from __future__ import annotations

import dataclasses

from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.disk_demand import DiskDemand, passes_ms
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, StepProgram


def with_blocking_copies(
    prediction: Prediction, link: LinkModel, program: StepProgram
) -> Prediction:
    """Return *prediction*, in which nothing waits, with its copies run in the way of compute.

    A disk below the host works beside it.

    Args:
        prediction: of a step without a link.
        link: what copies run at, and the disk.
        program: the step.
    """
    nbytes, disk = prediction.offloaded_bytes, link.disk
    # Streamed weights come in both passes, and as many in each.
    uploads_bytes = prediction.uploaded_bytes // 2
    compute_ms = prediction.compute_ms
    turn = next((each.start for each in program.segments if each.phase == BACKWARD), None)
    turn_ms = compute_ms if turn is None else prediction.start_ms[turn]
    forward_ms, backward_ms = passes_ms(
        forward_ms=turn_ms,
        backward_ms=compute_ms - turn_ms,
        link=link,
        offloaded_bytes=nbytes,
        demand=None if disk is None else DiskDemand.of(program, nbytes, disk),
        uploaded_bytes={FORWARD: uploads_bytes, BACKWARD: uploads_bytes},
    )
    return dataclasses.replace(
        prediction,
        step_ms=forward_ms + backward_ms,
        stall_forward_ms=forward_ms - turn_ms,
        stall_backward_ms=backward_ms - (compute_ms - turn_ms),
    )
