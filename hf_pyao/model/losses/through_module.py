"""Cross-entropy through a head that is more than one matrix, chunk by chunk of tokens.

For heads that cannot be taken apart (LoRA on the head, quantised weights, a module of the user's):
each chunk runs through the module itself and back, inside forward, and the gradients of its
trainable parameters are summed. Slower than ``cross_entropy.py`` where the module has a large
trainable matrix, whose gradient exists once more per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.losses.cross_entropy import Chunks
from hf_pyao.model.losses.options import LossOptions, Targets, check_shapes, transforms_of
from hf_pyao.model.losses.transforms import LogitTransform, apply_all

Projection = Callable[[Tensor], Tensor]
"""(n, D) hidden states -> (n, V) logits; differentiable, and row by row."""


def chunked_module_cross_entropy(
    hidden: Tensor,
    project: Projection,
    parameters: Sequence[Tensor],
    labels: Tensor,
    *,
    logits_dtype: torch.dtype,
    num_valid_vocab: int,
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
        num_valid_vocab: columns of the logits that count; padding after them is cut off.
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
        num_valid_vocab=num_valid_vocab,
        expected_factor=expected_factor,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _ModuleChunks(project, labels.reshape(-1), options, rows.shape[1]).loss(
        [rows, *parameters]
    )


class _ModuleChunks(Chunks):
    """Chunks through a module."""

    def __init__(
        self, project: Projection, labels: Tensor, options: LossOptions, num_hidden: int
    ) -> None:
        super().__init__(labels, options, num_hidden)
        self._project = project
        self._tensors: list[Tensor] = []

    def _begin(self, hidden: Tensor, *parameters: Tensor) -> None:
        self._tensors = [hidden, *parameters]

    def _chunk(self, start: int, stop: int) -> None:
        hidden, *parameters = self._tensors
        rows = hidden[start:stop].detach().requires_grad_(self.buffers[0] is not None)
        losses, weighted = _losses(rows, self._project, self.targets, self.options, start, stop)
        self.nll[start:stop] = losses.detach()
        both = zip(self.buffers, [rows, *parameters], strict=True)
        wanted = [(buffer, tensor) for buffer, tensor in both if buffer is not None]
        if not wanted:
            return
        tensors = [tensor for _, tensor in wanted]
        grads = torch.autograd.grad(weighted, tensors, allow_unused=True)
        for (buffer, tensor), grad in zip(wanted, grads, strict=True):
            if grad is not None and tensor is rows:
                buffer.write_rows(start, grad)
            elif grad is not None:
                buffer.add(grad)


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
