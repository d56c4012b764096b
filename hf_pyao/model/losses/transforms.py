"""What models do to their logits between the head and the loss, one pointwise step at a time.

Gemma caps (divide, tanh, scale), Cohere and HyperCLOVA X scale, Granite divides, and
``ForCausalLMLoss`` casts to float32. A chain of steps is replayed on every chunk with the rounding
that the model's own code has, and differentiated by the formulas that autograd uses for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Multiply by a number."""

    factor: float

    def forward(self, logits: Tensor) -> tuple[Tensor, None]:
        """Multiply in place."""
        return logits.mul_(self.factor), None

    def backward(self, grad: Tensor, saved: None) -> Tensor:
        """Multiply the gradient in place."""
        return grad.mul_(self.factor)


@dataclass(frozen=True)
class Divide:
    """Divide by a number. Not ``Scale(1 / divisor)``: that would round differently."""

    divisor: float

    def forward(self, logits: Tensor) -> tuple[Tensor, None]:
        """Divide in place."""
        return logits.div_(self.divisor), None

    def backward(self, grad: Tensor, saved: None) -> Tensor:
        """Divide the gradient in place."""
        return grad.div_(self.divisor)


@dataclass(frozen=True)
class Tanh:
    """Hyperbolic tangent. Keeps a copy of its result for backward."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take the tangent in place; the copy is for backward, as a later step may overwrite it."""
        result = logits.tanh_()
        return result, result.clone()

    def backward(self, grad: Tensor, saved: Tensor) -> Tensor:
        """Multiply the gradient by ``1 - tanh**2`` in place."""
        torch.ops.aten.tanh_backward.grad_input(grad, saved, grad_input=grad)
        return grad


@dataclass(frozen=True)
class Cast:
    """Change the dtype, as ``logits.float()`` does."""

    dtype: torch.dtype

    def forward(self, logits: Tensor) -> tuple[Tensor, torch.dtype]:
        """Cast, remembering the dtype that came in."""
        return logits.to(self.dtype), logits.dtype

    def backward(self, grad: Tensor, saved: torch.dtype) -> Tensor:
        """Cast the gradient back."""
        return grad.to(saved)


LogitTransform: TypeAlias = Scale | Divide | Tanh | Cast
"""A pointwise step on logits. ``forward(logits)`` returns the transformed logits and what
``backward(grad, saved)`` needs, which returns the gradient for the input of ``forward``. Either may
overwrite its argument."""


def softcap(cap: float) -> tuple[LogitTransform, ...]:
    """Return the steps of Gemma's soft-cap, ``cap * tanh(logits / cap)``."""
    return (Divide(cap), Tanh(), Scale(cap))


def largest_gain(transforms: Sequence[LogitTransform]) -> float:
    """Return the most by which the chain may scale a gradient up on its way back; at least 1."""
    gain = 1.0
    for transform in transforms:
        if isinstance(transform, Scale):
            gain *= max(1.0, abs(transform.factor))
        elif isinstance(transform, Divide) and transform.divisor:
            gain *= max(1.0, abs(1.0 / transform.divisor))
    return gain if math.isfinite(gain) else 1.0


def final_dtype(transforms: Sequence[LogitTransform], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits of *dtype* leave the chain."""
    for transform in transforms:
        if isinstance(transform, Cast):
            dtype = transform.dtype
    return dtype


def loss_dtype(transforms: Sequence[LogitTransform], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-softmax and loss sums: the chain's, but float32 at least."""
    return torch.promote_types(final_dtype(transforms, dtype), torch.float32)


def bytes_per_logit(transforms: Sequence[LogitTransform], dtype: torch.dtype) -> int:
    """Return the most bytes alive per logit of a chunk, with a head that computes in *dtype*.

    The projection, one result per changing cast and way, one copy per tanh, and the
    log-probabilities. The gradient takes the place of the logits that the loss was taken of.
    """
    current, total = dtype, dtype.itemsize
    for transform in transforms:
        if isinstance(transform, Cast) and transform.dtype != current:
            total += transform.dtype.itemsize + current.itemsize
            current = transform.dtype
        elif isinstance(transform, Tanh):
            total += current.itemsize
    wide = loss_dtype(transforms, dtype)
    if wide != current:
        total += wide.itemsize + current.itemsize
    return total + wide.itemsize
