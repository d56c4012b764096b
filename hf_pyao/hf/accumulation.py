"""What gradient accumulation costs where frozen weights are streamed."""

from __future__ import annotations

from hf_pyao.auto.offloader import Offloader
from hf_pyao.config import GIB
from hf_pyao.engine.transfer.ring_schedule import uploaded_bytes


def said_of_accumulation(offloader: Offloader, num_micro_batches: int) -> str:
    """Say what fewer and larger micro-batches would save of a step's uploads; empty for nothing.

    Args:
        offloader: of the model that is trained.
        num_micro_batches: of one optimizer step.
    """
    if offloader.weights is None or num_micro_batches < 2:
        return ""
    nbytes = uploaded_bytes([block.nbytes for block in offloader.weights.blocks])
    if not nbytes:
        return ""
    saved_bytes = num_micro_batches // 2 * nbytes
    return (
        f"stream_weights: each of the {num_micro_batches} micro-batches of a step uploads "
        f"{nbytes / GIB:.3f} GiB of weights; half as many of twice the size would save "
        f"{saved_bytes / GIB:.3f} GiB of uploads a step"
    )
