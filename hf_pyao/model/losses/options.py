"""What both ways through the head share: the options of a loss, and what its labels weigh.

[Note: Modes] torch's modes (``no_grad``, ``enable_grad``, ``autocast``) are put around a function,
not around lines by ``with``: an exception that a tracer raises on the way out of a ``with``, before
its end is called, would leave the mode on for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.model.losses.transforms import LogitTransform, largest_gain

REDUCTIONS = ("mean", "sum")

FP16_GRADIENT_UNIT = 1024.0
"""Gradients of float16 logits are formed in this unit, before loss scale and token count are
applied: probabilities down to 1/2**24 stay normal numbers, and no sum over the vocabulary comes
near 65504 for weights below 30. Where the logits are scaled up before the loss, the unit is smaller
by as much, as their gradient is scaled too."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Everything about a loss that is not a tensor of tokens.

    Raises:
        ConfigError: an unknown reduction, a smoothing outside [0, 1], or chunks without tokens.
    """

    chunk_tokens: int | None = None
    """Most tokens in one chunk; None: as many as *budget_bytes* hold."""
    budget_bytes: int | None = None
    """Bytes that one chunk may take; None: by the device."""
    transforms: Sequence[LogitTransform] = ()
    """Pointwise steps between projection and loss, such as ``softcap(30.0)``."""
    ignore_index: int = -100
    """Label of tokens that do not count."""
    reduction: str = "mean"
    """``"mean"`` over the tokens that count (NaN if none does), or ``"sum"``."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary."""
    num_valid_vocab: int | None = None
    """Columns of the logits that exist; the padding after them is cut off, and the gradient of its
    rows is zero. None: all."""
    expected_factor: Tensor | None = None
    """0-dim: what a summed loss will most likely be multiplied by, such as
    ``1 / num_items_in_batch``; gradients are right with any other, except for rounding."""

    def __post_init__(self) -> None:
        """Check the values; see the class docstring."""
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; expected a number between 0 and 1.",
                key="wrong-argument",
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(
                f"chunk_tokens is {self.chunk_tokens}; expected 1 token at least.",
                key="wrong-argument",
            )


@dataclass(frozen=True)
class Targets:
    """Labels, and how much each token weighs in the gradient."""

    labels: Tensor
    """(N,) int64, as they came."""
    valid: Tensor
    """(N,) bool: the label is not ``ignore_index``."""
    column: Tensor
    """(N,) int64: the label, or 0 where it is ignored."""
    weight: Tensor
    """(N,) in the dtype of the loss: weight of the token's gradient; 0 where it is ignored."""
    unit: Tensor
    """0-dim: what gradients formed with ``weight`` still have to be multiplied by."""
    divisor: Tensor
    """0-dim: what the factor of backward has to be divided by, as ``weight`` has it already."""

    @classmethod
    def of(
        cls, labels: Tensor, options: LossOptions, compute_dtype: torch.dtype, dtype: torch.dtype
    ) -> Targets:
        """Prepare *labels* for a loss in *dtype* of logits that a head computes in *compute_dtype*.

        No synchronisation with the device.
        """
        valid = labels != options.ignore_index
        column, counts = torch.where(valid, labels, 0), valid.to(dtype)
        one = counts.new_ones(())
        share = one / counts.sum() if options.reduction == "mean" else one
        if compute_dtype == torch.float16:
            # No token counts: the share is infinite, and every gradient is zero all the same.
            grown = FP16_GRADIENT_UNIT / largest_gain(options.transforms)
            unit = torch.where(share.isfinite(), share, 0.0) / grown
            return cls(labels, valid, column, counts * grown, unit, one)
        divisor = one
        if options.expected_factor is not None and options.reduction == "sum":
            expected = options.expected_factor.to(one)
            share = divisor = torch.where(expected.isfinite() & (expected != 0), expected, one)
        return cls(labels, valid, column, torch.where(valid, share, 0.0), one, divisor)

    def scale(self, factor: Tensor) -> Tensor:
        """Return what to multiply the gradients of parameters by if the loss is by *factor*.

        Exactly 1 for a factor that was expected: then every gradient has been rounded where the
        model's own path rounds it, with the factor in it already. Zero if no token counts, whatever
        the factor is: it may be 1/0 then, and the model's own gradients are zeros.
        """
        return torch.where(self.valid.any(), self._scale(factor), 0.0)

    def row_scale(self, factor: Tensor) -> Tensor:
        """Return the same for the hidden states, (N, 1): zero for tokens that do not count."""
        return torch.where(self.valid, self._scale(factor), 0.0).unsqueeze(1)

    def _scale(self, factor: Tensor) -> Tensor:
        return factor.to(self.unit.dtype) / self.divisor * self.unit


def reduce_loss(
    nll: Tensor, smooth: Tensor | None, targets: Targets, options: LossOptions, num_vocab: int
) -> Tensor:
    """Return the loss of all tokens, as ``torch.nn.functional.cross_entropy`` reduces it.

    Args:
        nll: (N,) loss of each token; what it is for ignored ones is ignored.
        smooth: (N,) sum of negative log-probabilities over the vocabulary, if labels are smoothed.
        targets: the labels.
        options: reduction, smoothing.
        num_vocab: columns of the logits.
    """
    # The same kernel as in the model's own path, on one column: it sums in the same order, and a
    # mean over no token is NaN like there.
    column = torch.where(targets.valid, 0, -100)
    loss = F.nll_loss(-nll.unsqueeze(1), column, ignore_index=-100, reduction=options.reduction)
    if smooth is None:
        return loss
    spread = smooth.masked_fill(~targets.valid, 0.0).sum()
    if options.reduction == "mean":
        spread = spread / targets.valid.sum()
    epsilon = options.label_smoothing
    return (1 - epsilon) * loss + (epsilon / num_vocab) * spread


def autocast_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which ``F.linear`` of these tensors would compute here and now."""
    present = [tensor for tensor in tensors if tensor is not None]
    dtype = present[0].dtype
    for tensor in present[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    device_type = present[0].device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


def autocast_of_now(device: torch.device, *, cache_enabled: bool = True) -> torch.autocast:
    """Return a context with the autocast state of now, for later."""
    dtype, enabled = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, dtype, enabled, cache_enabled)
