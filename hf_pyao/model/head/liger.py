"""The loss by Liger's fused kernel, where it is installed and asked for."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from hf_pyao.errors import ConfigError
from hf_pyao.model.head.put_off_call import LossRequest
from hf_pyao.model.losses import Cast, Divide, LogitTransform, Scale, Tanh


def check_liger() -> None:
    """Raise ConfigError unless ``liger-kernel`` is installed and there is a GPU for it."""
    remedy = "Choose head_loss='chunked', which needs neither."
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "head_loss='liger' needs the package liger-kernel, which is not installed "
            f"(pip install liger-kernel). {remedy}",
            key="missing-package",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"head_loss='liger' needs a GPU, and torch finds none. {remedy}", key="needs-gpu"
        )


def liger_can(request: LossRequest) -> bool:
    """Whether Liger's kernel knows what the model does to its logits: a cast, and one soft-cap."""
    steps = _without_casts(request.transforms)
    return not steps or _cap(steps) is not None


def liger_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LossRequest) -> Tensor:
    """Return the loss of (N, D) hidden states by Liger's fused linear cross-entropy.

    Half-precision gradients are summed in float32, as ours are. Written against liger-kernel 0.8.5.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    num_vocab = request.num_valid_vocab
    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden,
        weight[:num_vocab],
        request.labels,
        bias=None if bias is None else bias[:num_vocab],
        ignore_index=request.ignore_index,
        label_smoothing=request.label_smoothing,
        reduction=request.reduction,
        softcap=_cap(_without_casts(request.transforms)),
        accum_dtype=torch.float32 if weight.dtype.itemsize < 4 else None,
    )
    return loss


def _without_casts(transforms: tuple[LogitTransform, ...]) -> list[LogitTransform]:
    return [step for step in transforms if not isinstance(step, Cast)]


def _cap(steps: list[LogitTransform]) -> float | None:
    """Return c of the steps ``/ c``, ``tanh``, ``* c``; None if they are anything else."""
    if len(steps) != 3:
        return None
    first, middle, last = steps
    if isinstance(first, Divide) and isinstance(middle, Tanh) and last == Scale(first.divisor):
        return first.divisor
    return None
