"""The loss as models compute it, written without hf_pyao: the logits, then cross_entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.losses.cross_entropy import chunked_linear_cross_entropy
from hf_pyao.model.losses.transforms import Cast, LogitTransform, Scale, softcap


@dataclass(frozen=True)
class Case:
    """A head and a batch for it; tensors in float64, converted on use."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    cap: float | None = None
    scale: float | None = None
    upcast: bool = True
    """Whether the logits are cast to float32 before the loss, as ForCausalLMLoss does."""
    num_vocab: int | None = None

    def transforms(self) -> tuple[LogitTransform, ...]:
        """The same steps for hf_pyao."""
        steps: tuple[LogitTransform, ...] = ()
        if self.scale is not None:
            steps += (Scale(self.scale),)
        if self.cap is not None:
            steps += softcap(self.cap)
        return (*steps, Cast(torch.float32)) if self.upcast else steps


def make_case(
    num_tokens: int = 24,
    num_vocab: int = 61,
    num_hidden: int = 16,
    *,
    seed: int = 0,
    with_bias: bool = False,
    spread: float = 1.0,
    ignored: int = 3,
    **options: Any,
) -> Case:
    """Build a random case; *ignored* of the labels are -100."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(
        0, options.get("num_vocab") or num_vocab, (num_tokens,), generator=generator
    )
    labels[: min(ignored, num_tokens)] = -100
    return Case(
        normal(num_tokens, num_hidden),
        normal(num_vocab, num_hidden) * spread,
        labels,
        normal(num_vocab) if with_bias else None,
        **options,
    )


@dataclass(frozen=True)
class Result:
    """A loss and its gradients."""

    loss: Tensor
    grads: tuple[Tensor, ...]


def run_own(case: Case, dtype: torch.dtype, *, factor: float = 1.0, **options: Any) -> Result:
    """Loss and gradients through full logits, computed in *dtype*."""
    inputs = _leaves(case, dtype)
    logits = F.linear(inputs[0], inputs[1], inputs[2] if case.bias is not None else None)
    if case.scale is not None:
        logits = logits * case.scale
    if case.cap is not None:
        logits = torch.tanh(logits / case.cap) * case.cap
    if case.num_vocab is not None:
        logits = logits[..., : case.num_vocab]
    if case.upcast:
        logits = logits.float()
    return _differentiate(F.cross_entropy(logits, case.labels, **options), inputs, factor)


def run_truth(case: Case, dtype: torch.dtype, *, factor: float = 1.0, **options: Any) -> Result:
    """The same in float64 throughout, on inputs rounded to *dtype*."""
    rounded = replace(
        case,
        hidden=case.hidden.to(dtype).double(),
        weight=case.weight.to(dtype).double(),
        bias=None if case.bias is None else case.bias.to(dtype).double(),
        upcast=False,
    )
    return run_own(rounded, torch.float64, factor=factor, **options)


def run_chunked(
    case: Case, dtype: torch.dtype, *, factor: float = 1.0, chunk_tokens: int = 7, **options: Any
) -> Result:
    """The same by hf_pyao."""
    inputs = _leaves(case, dtype)
    loss = chunked_linear_cross_entropy(
        inputs[0],
        inputs[1],
        case.labels,
        inputs[2] if case.bias is not None else None,
        transforms=case.transforms(),
        num_valid_vocab=case.num_vocab,
        chunk_tokens=chunk_tokens,
        **options,
    )
    return _differentiate(loss, inputs, factor)


def _leaves(case: Case, dtype: torch.dtype) -> list[Tensor]:
    tensors = [case.hidden, case.weight] + ([] if case.bias is None else [case.bias])
    return [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]


def _differentiate(loss: Tensor, inputs: list[Tensor], factor: float) -> Result:
    grads = torch.autograd.grad(loss * factor, inputs)
    return Result(loss.detach(), grads)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of *truth*; 0 for two zeros."""
    difference = torch.linalg.vector_norm(value.detach().double() - truth.detach().double())
    norm = torch.linalg.vector_norm(truth.detach().double())
    return float(difference / norm) if norm > 0 else float(difference)
