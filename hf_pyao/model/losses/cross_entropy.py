"""Cross-entropy of a linear head, computed chunk by chunk of tokens, without the logits.

[Note: Gradients in forward] The loss is a scalar, so its gradients are known up to the factor that
backward brings. Each chunk therefore goes from hidden states to logits, log-probabilities and on to
its share of the gradients while its logits are there; backward multiplies by the factor. That
costs three matrix products, as the model's own loss does; recomputing the logits in backward would
cost four. The price is that the head's gradient exists from the end of forward, where the model's
own path would hold the logits; nothing else runs between the two. The idea of fusing the
projection with the loss and taking the gradients in forward is the fused linear cross-entropy of
the Liger Kernel paper ("Liger Kernel: Efficient Triton Kernels for LLM Training", section on
FusedLinearCrossEntropy); the cutting, the sums and the rounding here are our own.

[Note: Rounding] On every chunk the operations, their order and their dtypes are those of the
model's own path (projection, pointwise steps, log-softmax, negative log-likelihood, and their
derivatives). What differs is the order in which the head's gradient is summed over tokens, and
that half-precision gradients are summed in float32 and rounded once, after the factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.errors import ConfigError
from hf_pyao.model.gradient_buffer import GradientBuffer, has_wide_products, wide_product
from hf_pyao.model.losses.chunking import (
    ChunkPlan,
    choose_chunk_tokens,
    default_budget_bytes,
    plan_chunks,
)
from hf_pyao.model.losses.options import (
    LossOptions,
    Targets,
    autocast_dtype,
    check_shapes,
    graph_is_kept,
    reduce_loss,
    refuse_double_backward,
    transforms_of,
    used_up,
)
from hf_pyao.model.losses.tied_embedding import WaitingGradient
from hf_pyao.model.losses.transforms import LogitTransform, final_dtype, loss_dtype


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    transforms: Sequence[LogitTransform] = (),
    num_valid_vocab: int | None = None,
    chunk_tokens: int | None = None,
    expected_factor: Tensor | None = None,
    waiting: WaitingGradient | None = None,
) -> Tensor:
    """Return ``cross_entropy(transforms(linear(hidden, weight, bias)), labels)``, in chunks.

    Differentiable once, in *hidden*, *weight* and *bias*. Under autocast the head computes in the
    autocast dtype, as ``F.linear`` would. Draws no random numbers; the same inputs give the same
    bits. Peak bytes beside inputs and gradients: :attr:`ChunkPlan.chunk_bytes` of the plan, the
    head's weight once if autocast casts it, and twice the bytes of half-precision gradients
    (model/gradient_buffer.py, [Note: Where the wide sum lives]).

    Args:
        hidden: (..., D) floating.
        weight: (V, D) floating; V may include padding rows.
        labels: (...) int64, already shifted, one per hidden state.
        bias: (V,) or None.
        ignore_index: label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count (NaN if none does), or ``"sum"``.
        label_smoothing: share of each target that is spread evenly over the vocabulary.
        transforms: pointwise steps between projection and loss, such as ``softcap(30.0)``.
        num_valid_vocab: cut the logits to this many columns, as models with a padded vocabulary
            do. The gradient of the rows after them is zero.
        chunk_tokens: most tokens per chunk; None: by :func:`default_budget_bytes`.
        expected_factor: 0-dim, what a summed loss will most likely be multiplied by, such as
            ``1 / num_items_in_batch``; gradients are right with any other, except for rounding.
        waiting: where the head's gradient waits for a tied embedding's; *weight* is the alias that
            belongs to it then (tied_embedding.py).

    Returns:
        0-dim loss, in float32 or what the transforms lead to (half precision included).

    Raises:
        ConfigError: shapes that do not fit, or an unknown reduction.
        IndexError: a label outside the vocabulary (on a CPU; elsewhere a device-side assertion).
    """
    check_shapes(hidden, labels, weight.shape[1])
    num_vocab = _num_valid_vocab(num_valid_vocab, weight.shape[0])
    steps = transforms_of(transforms)
    dtype = autocast_dtype(hidden, weight, bias)
    if chunk_tokens is None:
        budget_bytes = default_budget_bytes(hidden.device)
        chunk_tokens = choose_chunk_tokens(num_vocab, weight.shape[1], dtype, budget_bytes, steps)
    options = LossOptions(
        compute_dtype=dtype,
        chunk_tokens=chunk_tokens,
        transforms=steps,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        num_valid_vocab=num_vocab,
        expected_factor=expected_factor,
    )
    parameters = [weight] if bias is None else [weight, bias]
    chunks = _LinearChunks(labels.reshape(-1), options, hidden.shape[-1])
    return chunks.loss([hidden.reshape(-1, hidden.shape[-1]), *parameters], waiting)


def _num_valid_vocab(requested: int | None, num_vocab: int) -> int:
    if requested is None:
        return num_vocab
    if not 1 <= requested <= num_vocab:
        raise ConfigError(
            f"num_valid_vocab is {requested}; expected 1 to {num_vocab}, the rows of the head.",
            key="wrong-argument",
        )
    return requested


class Chunks(ABC):
    """One pass over the tokens: losses per token, and sums of gradients.

    Args:
        labels: (N,) int64.
        options: of the loss.
        num_hidden: columns of the hidden states.
    """

    def __init__(self, labels: Tensor, options: LossOptions, num_hidden: int) -> None:
        self.options = options
        self.plan: ChunkPlan = plan_chunks(
            labels.shape[0],
            options.num_valid_vocab or 1,
            num_hidden,
            options.compute_dtype,
            options.transforms,
            options.chunk_tokens,
        )
        self.loss_dtype = loss_dtype(options.transforms, options.compute_dtype)
        self.targets = Targets.of(labels, options, self.loss_dtype)
        # On the labels' device: accelerate may have put the head on another one than its input.
        self.nll = torch.empty(labels.shape[0], dtype=self.loss_dtype, device=labels.device)
        self.smooth: Tensor | None = None
        self.buffers: list[GradientBuffer | None] = []
        """Of hidden states and parameters; None where no gradient is asked for."""

    def loss(self, tensors: Sequence[Tensor], waiting: WaitingGradient | None = None) -> Tensor:
        """Return the loss; differentiable once in *tensors*, hidden states (N, D) first.

        Args:
            tensors: hidden states, and parameters that may be trained.
            waiting: where the gradient of the first parameter waits; None: nowhere.
        """
        loss: Tensor = _ChunkedLoss.apply(self, waiting, *tensors)  # type: ignore[no-untyped-call]
        return loss

    def run(self, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> Tensor:
        """Go through all chunks and return the loss; the gradients are in :attr:`buffers`."""
        self._begin(*tensors)
        self.buffers = [
            self._buffer(at, tensor) if need else None
            for at, (tensor, need) in enumerate(zip(tensors, needs_grad, strict=True))
        ]
        for start, stop in self.plan.slices():
            self._chunk(start, stop)
        loss = reduce_loss(self.nll, self.smooth, self.targets, self.options)
        return loss.to(final_dtype(self.options.transforms, self.options.compute_dtype))

    def _buffer(self, at: int, tensor: Tensor) -> GradientBuffer:
        return GradientBuffer.of(tensor)

    @abstractmethod
    def _begin(self, hidden: Tensor, *parameters: Tensor) -> None:
        """Prepare for the chunks."""

    @abstractmethod
    def _chunk(self, start: int, stop: int) -> None:
        """Add the tokens from *start* to *stop* to the losses and the gradients."""


class _ChunkedLoss(torch.autograd.Function):
    """See [Note: Gradients in forward]. Gradients are kept on ctx, not saved for backward:
    saved-tensor hooks would move them, and they are used up in place."""

    @staticmethod
    def forward(
        ctx: Any, chunks: Chunks, waiting: WaitingGradient | None, *tensors: Tensor
    ) -> Tensor:
        """Compute the loss and the gradients; see [Note: Gradients in forward]."""
        loss = chunks.run(tensors, ctx.needs_input_grad[2:])
        ctx.waiting, ctx.shapes = waiting, [tensor.shape for tensor in tensors]
        ctx.gradients = chunks.buffers, chunks.targets
        return loss

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
        scale = targets.scale(grad_loss)
        results: list[Tensor | None] = []
        for at, (buffer, shape) in enumerate(zip(buffers, ctx.shapes, strict=True)):
            if buffer is None or not ctx.needs_input_grad[2 + at]:
                results.append(None)
                continue
            factor = scale if at else targets.row_scale(grad_loss)
            found = buffer.finish(factor, keep=keep).view(shape)
            is_waiting = at == 1 and ctx.waiting is not None and ctx.waiting.put(found)
            results.append(None if is_waiting else found)
        return None, None, *results


class _LinearChunks(Chunks):
    """Chunks through one matrix, with reused buffers."""

    def run(self, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> Tensor:
        """Go through all chunks and return the loss."""
        # Not by `with`: [Note: Modes] in options.py.
        run = torch.autocast(tensors[0].device.type, enabled=False)(super().run)
        loss: Tensor = run(tensors, needs_grad)
        return loss

    def _buffer(self, at: int, tensor: Tensor) -> GradientBuffer:
        """Return a buffer; that of weight and bias is cut to the vocabulary."""
        columns = tensor.shape[1] if tensor.dim() == 2 else 1
        valid = self.options.num_valid_vocab if at else None
        buffer = GradientBuffer(tensor.shape[0], columns, tensor.dtype, tensor.device, valid)
        buffer.take_memory()
        return buffer

    def _begin(self, hidden: Tensor, *parameters: Tensor) -> None:
        weight, *biases = parameters
        dtype, device = self.options.compute_dtype, hidden.device
        num_vocab = self.options.num_valid_vocab or weight.shape[0]
        self.hidden = hidden
        self.weight = weight[:num_vocab].to(dtype)
        self.bias = biases[0][:num_vocab].to(dtype) if biases else None
        if self.options.label_smoothing:
            self.smooth = torch.empty_like(self.nll)
        rows = min(self.plan.chunk_tokens, hidden.shape[0])
        self.logits = torch.empty(rows, num_vocab, dtype=dtype, device=device)
        self.log_probs = torch.empty(rows, num_vocab, dtype=self.loss_dtype, device=device)

    def _chunk(self, start: int, stop: int) -> None:
        hidden = self.hidden[start:stop].to(self.options.compute_dtype)
        logits = self._project(hidden)
        saved = []
        for transform in self.options.transforms:
            logits, kept = transform.forward(logits)
            saved.append(kept)
        end_dtype, logits = logits.dtype, logits.to(self.loss_dtype)
        log_probs = torch.log_softmax(logits, dim=-1, out=self.log_probs[: stop - start])
        self.nll[start:stop] = F.nll_loss(
            log_probs,
            self.targets.labels[start:stop],
            ignore_index=self.options.ignore_index,
            reduction="none",
        )
        if self.smooth is not None:
            self.smooth[start:stop] = -log_probs.sum(dim=1)
        if not any(self.buffers):
            return
        grad = self._loss_gradient(log_probs, logits, start, stop).to(end_dtype)
        for transform, kept in zip(reversed(self.options.transforms), reversed(saved), strict=True):
            grad = transform.backward(grad, kept)
        self._add_gradients(grad, hidden, log_probs, start)

    def _project(self, hidden: Tensor) -> Tensor:
        out = self.logits[: hidden.shape[0]]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def _loss_gradient(self, log_probs: Tensor, room: Tensor, start: int, stop: int) -> Tensor:
        """Return the gradient of the logits, written into *room*; *log_probs* is free then.

        On a CPU by the kernel of log-softmax's own backward, whose bits the model's own path has;
        it reads and writes each element once, so that its result may take its argument's place.
        """
        weight = self.targets.weight[start:stop]
        epsilon = self.options.label_smoothing
        rows = torch.arange(stop - start, device=room.device)
        columns = self.targets.column[start:stop]
        spread = (weight * (epsilon / room.shape[1])).unsqueeze(1)
        if room.device.type == "cpu":
            room.copy_(-spread) if epsilon else room.zero_()
            room[rows, columns] -= weight * (1 - epsilon)
            torch.ops.aten._log_softmax_backward_data.out(room, log_probs, -1, room.dtype, out=room)
            return room
        torch.exp(log_probs, out=room).mul_(weight.unsqueeze(1))
        if epsilon:
            room.sub_(spread)
        room[rows, columns] -= weight * (1 - epsilon)
        return room

    def _add_gradients(self, grad: Tensor, hidden: Tensor, room: Tensor, start: int) -> None:
        """Add a chunk's share. *room* is a buffer of the loss that is free now."""
        if grad.dtype.itemsize == 2 and not has_wide_products(grad):
            grad, hidden = room.copy_(grad), hidden.to(room.dtype)
        of_hidden, of_weight, *of_biases = self.buffers
        if of_hidden is not None:
            of_hidden.write_rows(start, wide_product(grad, self.weight))
        for of_bias in of_biases:
            if of_bias is not None:
                of_bias.add(grad.sum(dim=0, dtype=of_bias.wide_dtype))
        if of_weight is not None:
            of_weight.add_product(grad, hidden)
