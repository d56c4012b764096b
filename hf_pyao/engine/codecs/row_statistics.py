"""Saved tensors that no lossy codec may touch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ROW_PADDING = 64
"""Rows that an attention kernel may add to its logsumexp."""


def is_row_statistic(tensor: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Say whether *tensor* holds one number for each row of another saved tensor.

    Args:
        tensor: what is saved.
        shapes: of what the same layer call saves.

    Means, reciprocal deviations and logsumexp: a small error in one of them is an error in a whole
    row of gradients, so that no lossy codec may touch them. They are known by shape: that of
    another tensor of the layer call without its last dimension, or with 1 in its place. Attention
    kernels may pad the rows, hence the last comparison.
    """
    shape = tuple(tensor.shape)
    if not shape or shape[-1] == 1 or tensor.dtype != torch.float32:
        return bool(shape) and shape[-1] == 1
    return any(
        len(other) == len(shape) + 1
        and other[: len(shape) - 1] == shape[:-1]
        and other[-2] <= shape[-1] < other[-2] + ROW_PADDING
        for other in shapes
    )
