"""Copies under which compute stands still: where the host is the device, as on a CPU."""

from __future__ import annotations

import dataclasses

from hf_pyao.plan.hardware.speeds import LinkModel
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.plan.step.prediction import Prediction


def with_blocking_copies(prediction: Prediction, link: LinkModel) -> Prediction:
    """Return *prediction*, in which nothing waits, with its copies run in the way of compute.

    Args:
        prediction: of a step without a link.
        link: what copies run at.
    """
    nbytes = prediction.offloaded_bytes
    # Streamed weights come in both passes, and as many in each.
    uploads_bytes = prediction.uploaded_bytes // 2
    uploads_ms = link.copy_ms(RELOAD, uploads_bytes) if uploads_bytes else 0.0
    forward_ms, backward_ms = (
        (link.copy_ms(direction, nbytes) if nbytes else 0.0) + uploads_ms
        for direction in (OFFLOAD, RELOAD)
    )
    return dataclasses.replace(
        prediction,
        step_ms=prediction.compute_ms + forward_ms + backward_ms,
        stall_forward_ms=forward_ms,
        stall_backward_ms=backward_ms,
    )
