"""Cross-entropy through a head that is more than one matrix, chunk by chunk of tokens.

For heads that cannot be taken apart (LoRA on the head, quantised weights, a module of the user's):
each chunk runs through the module itself and back, inside forward, and the gradients of its
trainable parameters are summed. Slower than ``cross_entropy.py`` where the module has a large
trainable matrix, whose gradient exists once more per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.gradient_buffer import GradientBuffer
from hf_pyao.model.losses.chunking import plan_chunks
from hf_pyao.model.losses.options import (
    LossOptions,
    Targets,
    check_shapes,
    graph_is_kept,
    reduce_loss,
    refuse_double_backward,
    transforms_of,
    used_up,
)
from hf_pyao.model.losses.transforms import LogitTransform, apply_all, final_dtype, loss_dtype

Projection = Callable[[Tensor], Tensor]
"""(n, D) hidden states -> (n, V) logits; differentiable, and row by row."""


def chunked_module_cross_entropy(
    hidden: Tensor,
    project: Projection,
    parameters: Sequence[Tensor],
    labels: Tensor,
    *,
    logits_dtype: torch.dtype,
    num_vocab: int,
    chunk_tokens: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    transforms: Sequence[LogitTransform] = (),
    expected_factor: Tensor | None = None,
) -> Tensor:
    """Return ``cross_entropy(transforms(project(hidden)), labels)`` without the logits.

    Differentiable once, in *hidden* and *parameters*. *project* must treat tokens independently and
    draw no random numbers (no dropout).

    Args:
        hidden: (..., D).
        project: the head; called under the autocast state of the caller.
        parameters: what *project* uses and may be trained; those that need no gradient are skipped.
        labels: (...) int64, already shifted.
        logits_dtype: what *project* returns here.
        num_vocab: columns of the logits that count; padding after them is cut off.
        chunk_tokens: most tokens per chunk.
        ignore_index: label of tokens that do not count.
        reduction: ``"mean"`` or ``"sum"``.
        label_smoothing: as for ``cross_entropy``.
        transforms: pointwise steps between *project* and the loss.
        expected_factor: as for ``chunked_linear_cross_entropy``.

    Raises:
        ConfigError: shapes that do not fit, or an unknown reduction.
    """
    check_shapes(hidden, labels, None)
    options = LossOptions(
        compute_dtype=logits_dtype,
        chunk_tokens=chunk_tokens,
        transforms=transforms_of(transforms),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        num_valid_vocab=num_vocab,
        expected_factor=expected_factor,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _ModuleCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, labels.reshape(-1), project, options, *parameters
    )
    return loss


class _ModuleCrossEntropy(torch.autograd.Function):
    """Each chunk forward and back inside forward; backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        project: Projection,
        options: LossOptions,
        *parameters: Tensor,
    ) -> Tensor:
        """Compute the loss and the gradients."""
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        inputs = [hidden, *parameters]
        wide = loss_dtype(options.transforms, options.compute_dtype)
        targets = Targets.of(labels, options, wide)
        buffers = [
            _buffer(tensor) if need else None for tensor, need in zip(inputs, needs, strict=True)
        ]
        # On the labels' device: accelerate may have put the head on another one than its input.
        losses = torch.empty(hidden.shape[0], dtype=wide, device=labels.device)
        plan = plan_chunks(
            hidden.shape[0],
            options.num_valid_vocab or 1,
            hidden.shape[1],
            options.compute_dtype,
            options.transforms,
            options.chunk_tokens,
        )
        for start, stop in plan.slices():
            losses[start:stop] = _chunk(
                hidden, parameters, project, targets, options, buffers, start, stop
            )
        ctx.gradients = (buffers, targets)
        ctx.shapes = [tensor.shape for tensor in inputs]
        loss = reduce_loss(losses, None, targets, options)
        return loss.to(final_dtype(options.transforms, options.compute_dtype))

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by *grad_loss*, using them up unless the graph is kept."""
        refuse_double_backward()
        if ctx.gradients is None:
            raise used_up()
        keep = graph_is_kept()
        buffers, targets = ctx.gradients
        if not keep:
            ctx.gradients = None
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        scale = targets.scale(grad_loss)
        scales = [targets.row_scale(grad_loss), *(scale for _ in buffers[1:])]
        results = [
            buffer.finish(scale, keep=keep).view(shape) if buffer is not None and need else None
            for buffer, scale, shape, need in zip(buffers, scales, ctx.shapes, needs, strict=True)
        ]
        return results[0], None, None, None, *results[1:]


def _buffer(tensor: Tensor) -> GradientBuffer:
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    columns = tensor.numel() // max(rows, 1)
    return GradientBuffer(rows, columns, tensor.dtype, tensor.device)


def _chunk(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    project: Projection,
    targets: Targets,
    options: LossOptions,
    buffers: Sequence[GradientBuffer | None],
    start: int,
    stop: int,
) -> Tensor:
    """Return the losses of one chunk's tokens, and add its gradients to *buffers*."""
    rows = hidden[start:stop].detach().requires_grad_(buffers[0] is not None)
    losses, weighted = _losses(rows, project, targets, options, start, stop)
    wanted = [(i, tensor) for i, tensor in enumerate([rows, *parameters]) if buffers[i] is not None]
    if wanted:
        tensors = [tensor for _, tensor in wanted]
        grads = torch.autograd.grad(weighted, tensors, allow_unused=True)
        for (i, _), grad in zip(wanted, grads, strict=True):
            buffer = buffers[i]
            if buffer is None or grad is None:
                continue
            if i == 0:
                buffer.write_rows(start, grad)
            else:
                buffer.add(grad)
    return losses.detach()


@torch.enable_grad()  # not by `with`: [Note: Modes] in options.py
def _losses(
    rows: Tensor,
    project: Projection,
    targets: Targets,
    options: LossOptions,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """Return the losses of one chunk's tokens, and their weighted sum; both in the graph."""
    logits = apply_all(options.transforms, project(rows))[:, : options.num_valid_vocab]
    losses = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        targets.labels[start:stop].to(logits.device),
        ignore_index=options.ignore_index,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    return losses, (losses * targets.weight[start:stop].to(losses.device)).sum()
