"""A tied embedding's gradient, added into the head's instead of beside it.

With tied weights autograd gets two dense gradients of one parameter, vocabulary x hidden each: the
head's at the start of backward, and the embedding's at its very end, where it sets the peak at
small micro-batches. Autograd holds the first one until the second has come, then adds them.

[Note: The waiting gradient] While the head's gradient waits inside autograd, the embedding's
backward adds its rows into it, block by block, and returns nothing. That is right because
autograd passes a parameter's gradient on only when every node that may contribute has run, and the
embedding is one of them. If anything is different from the plain case (the head had no part in
this backward, or had two, or the gradient was summed into another tensor meanwhile), the embedding
returns its own dense gradient as it always did. The waiting gradient is known by a weak reference,
so that it dies with autograd's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_BLOCK_BYTES = 32 * 2**20
"""Bytes of embedding gradient that exist at a time."""


class WaitingGradient:
    """The head's gradient of one parameter, while autograd holds it for the embedding's.

    One object serves one parameter for as long as its head loss is installed.
    """

    def __init__(self) -> None:
        self._graph_task = -1
        self._num_heads = 0
        self._gradient: weakref.ref[Tensor] | None = None
        self._stream: torch.Stream | None = None

    def head_done(self, gradient: Tensor) -> None:
        """Note that the head's backward hands *gradient* to autograd now."""
        task = _graph_task()
        if task != self._graph_task:
            self._graph_task, self._num_heads = task, 0
        self._num_heads += 1
        self._gradient = weakref.ref(gradient)
        self._stream = _current_stream(gradient)

    def take(self) -> Tensor | None:
        """Return the gradient that waits in the running backward, if it is the only one."""
        if self._graph_task != _graph_task() or self._num_heads != 1 or self._gradient is None:
            return None
        gradient = self._gradient()
        if gradient is None or self._stream != _current_stream(gradient):
            return None
        return gradient


def tied_embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None, waiting: WaitingGradient
) -> Tensor:
    """Return ``F.embedding(ids, weight, padding_idx)``; its gradient joins the head's.

    Args:
        ids: (...) int64.
        weight: (V, D), the parameter that the head has too.
        padding_idx: row whose gradient is zero, or None.
        waiting: where the head's backward notes its gradient; see [Note: The waiting gradient].
    """
    embedded: Tensor = _TiedEmbedding.apply(ids, weight, padding_idx, waiting)  # type: ignore[no-untyped-call]
    return embedded


class _TiedEmbedding(torch.autograd.Function):
    """See [Note: The waiting gradient]."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, waiting: WaitingGradient
    ) -> Tensor:
        """Look the rows up."""
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]
        # As in F.embedding, which counts a negative index from the end; -1 means none below it.
        ctx.padding_idx = -1 if padding_idx is None else padding_idx % weight.shape[0]
        ctx.waiting = waiting
        return torch.embedding(weight, ids, ctx.padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add the rows into the waiting gradient, or return a dense one."""
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        waiting = None if torch.is_grad_enabled() else ctx.waiting.take()
        if waiting is not None and waiting.dtype == grad.dtype and waiting.is_contiguous():
            _add_rows(waiting, ids, grad, ctx.padding_idx)
            return None, None, None, None
        dense = torch.ops.aten.embedding_dense_backward(
            grad, ids, ctx.num_rows, ctx.padding_idx, False
        )
        return None, dense, None, None


def _add_rows(total: Tensor, ids: Tensor, grad: Tensor, padding_idx: int) -> None:
    """Add the embedding's gradient to *total*, a block of rows at a time.

    The blocks go through the kernel of the dense gradient, which sums repeated rows in a fixed
    order; ids outside the block become its padding, which the kernel skips.
    """
    num_rows, num_cols = total.shape
    block_rows = max(1, _BLOCK_BYTES // (num_cols * total.element_size()))
    skipped = ids == padding_idx
    for start in range(0, num_rows, block_rows):
        rows = min(block_rows, num_rows - start)
        outside = skipped | (ids < start) | (ids >= start + rows)
        local = torch.where(outside, rows, ids - start)
        block = torch.ops.aten.embedding_dense_backward(grad, local, rows + 1, rows, False)
        total[start : start + rows].add_(block[:rows])


def _graph_task() -> int:
    task: int = torch._C._current_graph_task_id()
    return task


def _current_stream(tensor: Tensor) -> torch.Stream | None:
    if tensor.device.type == "cpu":
        return None
    return torch.accelerator.current_stream(tensor.device)
