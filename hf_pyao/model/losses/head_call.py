"""What logits that are put off need of the head whose call they stand for."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hf_pyao.model.losses.transforms import LogitTransform


class HeadCall(Protocol):
    """One call of a head that was put off."""

    num_vocab: int
    """Columns of the logits."""
    dtype: torch.dtype
    """What the head would have returned."""
    device: torch.device
    """Where the head would have put it."""
    requires_grad: bool
    """Whether its result would have been part of the graph."""
    without_gradients: bool
    """Whether steps are remembered where gradients are off, too."""
    loss_taken: bool
    """Whether a loss that is to be differentiated has been taken without the logits."""

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        """Call the head as the model would have: (..., D) -> (..., V). *reason*: what needs it."""
        ...

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        transforms: tuple[LogitTransform, ...],
        num_valid_vocab: int,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Tensor:
        """Return the loss of (N, D) hidden states and (N,) labels without their logits."""
        ...
