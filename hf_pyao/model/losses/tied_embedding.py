"""A tied embedding's gradient, added into the head's instead of beside it.

With tied weights autograd gets two dense gradients of one parameter, vocabulary x hidden each: the
head's at the start of backward, and the embedding's at its very end, where it sets the peak at
small micro-batches.

[Note: The waiting gradient] Embedding and head of one forward use an alias of the weight, whose
node in the graph is ours. The head's backward leaves its gradient with :class:`WaitingGradient` and
hands nothing to autograd; the embedding's adds its rows into it, block by block; the alias's node,
which runs when both have, takes it out and passes it on. Until then nobody else has seen that
tensor: no hook holds it, and autograd cannot have summed it into another one. If anything is
different from the plain case (the head has no part in this backward, or runs on another stream),
gradients go the usual way, and autograd adds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_pyao.plan.step.loops import slices_of

_BLOCK_BYTES = 32 * 2**20
"""Bytes of embedding gradient that exist at a time."""


class WaitingGradient:
    """The head's gradient of one forward's alias; see [Note: The waiting gradient].

    Args:
        weight: (V, D); what the alias is of.
    """

    def __init__(self, weight: Tensor) -> None:
        self._stream = _current_stream(weight)  # where the alias's node runs
        self._device = weight.device
        self._graph_task = -1
        self._gradient: Tensor | None = None

    def put(self, gradient: Tensor) -> bool:
        """Leave *gradient*, which nobody else has; False if it has to go the usual way."""
        if self._stream != _current_stream(gradient) or gradient.device != self._device:
            return False
        waiting = self.peek()
        if waiting is not None:  # of another loss of the same forward
            waiting += gradient
            return True
        self._graph_task, self._gradient = _graph_task(), gradient
        return True

    def peek(self) -> Tensor | None:
        """Return the gradient that waits in the running backward, if there is one."""
        if self._graph_task != _graph_task():
            self._gradient = None  # of a backward that did not get to the alias
        if self._gradient is None or self._stream != _current_stream(self._gradient):
            return None
        return self._gradient

    def take(self) -> Tensor | None:
        """Return the same, and forget it."""
        gradient, self._gradient = self.peek(), None
        return gradient


def tie(weight: Tensor) -> tuple[Tensor, WaitingGradient]:
    """Return an alias of *weight* for one forward's embedding and head, and where they meet."""
    waiting = WaitingGradient(weight)
    alias: Tensor = _Alias.apply(weight, waiting)  # type: ignore[no-untyped-call]
    return alias, waiting


class _Alias(torch.autograd.Function):
    """See [Note: The waiting gradient]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, waiting: WaitingGradient) -> Tensor:
        """Return the same memory."""
        ctx.set_materialize_grads(False)
        ctx.waiting = waiting
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Pass on what waits, and what came the usual way."""
        waiting = ctx.waiting.take()
        if waiting is None:
            return grad, None
        return (waiting if grad is None else waiting.add_(grad)), None


def tied_embedding(
    ids: Tensor, alias: Tensor, padding_idx: int | None, waiting: WaitingGradient
) -> Tensor:
    """Return ``F.embedding(ids, alias, padding_idx)``; its gradient joins the head's.

    Args:
        ids: (...) int64.
        alias: (V, D), from :func:`tie`; the head has it too.
        padding_idx: row whose gradient is zero, or None.
        waiting: from the same call of :func:`tie`.
    """
    embedded: Tensor = _TiedEmbedding.apply(ids, alias, padding_idx, waiting)  # type: ignore[no-untyped-call]
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
        waiting = None if torch.is_grad_enabled() else ctx.waiting.peek()
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
    for start, stop in slices_of(num_rows, block_rows):
        rows = stop - start
        outside = skipped | (ids < start) | (ids >= start + rows)
        local = torch.where(outside, rows, ids - start)
        block = torch.ops.aten.embedding_dense_backward(grad, local, rows + 1, rows, False)
        total[start:stop].add_(block[:rows])


def _graph_task() -> int:
    task: int = torch._C._current_graph_task_id()
    return task


def _current_stream(tensor: Tensor) -> torch.Stream | None:
    if tensor.device.type == "cpu":
        return None
    return torch.accelerator.current_stream(tensor.device)
