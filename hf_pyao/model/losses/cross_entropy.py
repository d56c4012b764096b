"""Cross-entropy of a head, computed chunk by chunk of tokens, without the logits.

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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hf_pyao.errors import ConfigError, ConflictError, ReleasedTensorError
from hf_pyao.model.gradient_buffer import GradientBuffer, has_wide_products, wide_product
from hf_pyao.model.losses.chunking import choose_chunk_tokens, default_budget_bytes, plan_chunks
from hf_pyao.model.losses.options import (
    LossOptions,
    Targets,
    autocast_dtype,
    autocast_of_now,
    reduce_loss,
)
from hf_pyao.model.losses.tied_embedding import WaitingGradient
from hf_pyao.model.losses.transforms import final_dtype, loss_dtype

Projection = Callable[[Tensor], Tensor]
"""(n, D) hidden states -> (n, V) logits; differentiable, and row by row."""


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    waiting: WaitingGradient | None = None,
    **options: Any,
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
        waiting: where the weight's gradient waits for a tied embedding's; *weight* is the alias
            that belongs to it then (tied_embedding.py).
        options: fields of :class:`LossOptions`.

    Returns:
        0-dim loss, in float32 or what the transforms lead to (half precision included).

    Raises:
        ConfigError: labels that do not fit, or a wrong option.
        IndexError: a label outside the vocabulary (on a CPU; elsewhere a device-side assertion).
    """
    dtype = autocast_dtype(hidden, weight, bias)
    sizes: Any = {"num_vocab": weight.shape[0], "compute_dtype": dtype}
    parameters = [weight] if bias is None else [weight, bias]
    return LinearChunks(hidden, parameters, labels, LossOptions(**options), **sizes).loss(waiting)


class Chunks(ABC):
    """One pass over the tokens: losses per token, and sums of gradients.

    Args:
        hidden: (..., D) hidden states.
        parameters: what the head uses and may be trained.
        labels: (...) int64, one per hidden state, on the device of the logits.
        options: of the loss.
        num_vocab: columns of the head's logits.
        compute_dtype: what the head computes its logits in.

    Raises:
        ConfigError: there is not one label per hidden state.
    """

    def __init__(
        self,
        hidden: Tensor,
        parameters: Sequence[Tensor],
        labels: Tensor,
        options: LossOptions,
        *,
        num_vocab: int,
        compute_dtype: torch.dtype,
    ) -> None:
        if hidden.shape[:-1] != labels.shape:
            raise ConfigError(
                f"hidden states of shape {tuple(hidden.shape)} need labels of shape "
                f"{tuple(hidden.shape[:-1])}, one per token; got {tuple(labels.shape)}. Shift and "
                "flatten both in the same way.",
                key="wrong-argument",
            )
        self.tensors = [hidden.reshape(-1, hidden.shape[-1]), *parameters]
        self.options = options
        self.num_vocab = options.num_valid_vocab or num_vocab
        self.compute_dtype = compute_dtype
        sizes = self.num_vocab, hidden.shape[-1], compute_dtype
        chunk_tokens = options.chunk_tokens
        if chunk_tokens is None:
            budget_bytes = options.budget_bytes or default_budget_bytes(hidden.device)
            chunk_tokens = choose_chunk_tokens(*sizes, budget_bytes, options.transforms)
        self.plan = plan_chunks(labels.numel(), *sizes, options.transforms, chunk_tokens)
        self.loss_dtype = loss_dtype(options.transforms, compute_dtype)
        labels = labels.reshape(-1)
        self.targets = Targets.of(labels, options, compute_dtype, self.loss_dtype)
        self.nll = torch.empty(labels.shape[0], dtype=self.loss_dtype, device=labels.device)
        self.smooth = torch.empty_like(self.nll) if options.label_smoothing else None
        self.buffers: list[GradientBuffer | None] = []
        """Of hidden states and parameters; None where no gradient is asked for."""

    def loss(self, waiting: WaitingGradient | None = None) -> Tensor:
        """Return the loss; differentiable once in hidden states and parameters.

        Args:
            waiting: where the gradient of the first parameter waits for a tied embedding's
                (tied_embedding.py); None: nowhere.
        """
        loss: Tensor = _ChunkedLoss.apply(self, waiting, *self.tensors)  # type: ignore[no-untyped-call]
        return loss

    def run(self, needs_grad: Sequence[bool]) -> Tensor:
        """Go through all chunks and return the loss; the gradients are in :attr:`buffers`."""
        rows = min(self.plan.chunk_tokens, self.plan.num_tokens)
        self.log_probs = self.nll.new_empty(rows, self.num_vocab)
        self.buffers = [
            self._buffer(at, tensor) if need else None
            for at, (tensor, need) in enumerate(zip(self.tensors, needs_grad, strict=True))
        ]
        for start, stop in self.plan.slices():
            self._chunk(start, stop)
        loss = reduce_loss(self.nll, self.smooth, self.targets, self.options, self.num_vocab)
        return loss.to(final_dtype(self.options.transforms, self.compute_dtype))

    @abstractmethod
    def _buffer(self, at: int, tensor: Tensor) -> GradientBuffer:
        """Return what sums the gradient of *tensor*, the one at *at*."""

    @abstractmethod
    def _project(self, start: int, stop: int) -> tuple[Tensor, Any]:
        """Return the logits of the tokens from *start* to *stop*, which may be overwritten, and
        what :meth:`_add_gradients` needs."""

    @abstractmethod
    def _add_gradients(self, grad: Tensor, kept: Any, room: Tensor, start: int) -> None:
        """Add what follows from *grad*, of the logits. *room* is as large, and free."""

    def _chunk(self, start: int, stop: int) -> None:
        """Add the tokens from *start* to *stop* to the losses and the gradients."""
        logits, kept = self._project(start, stop)
        steps: list[tuple[Any, Any]] = []
        for transform in self.options.transforms:
            logits, saved = transform.forward(logits)
            steps.append((transform, saved))
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
        for transform, saved in reversed(steps):
            grad = transform.backward(grad, saved)
        self._add_gradients(grad, kept, log_probs, start)

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


class _ChunkedLoss(torch.autograd.Function):
    """See [Note: Gradients in forward]. Gradients are kept on ctx, not saved for backward:
    saved-tensor hooks would move them, and they are used up in place."""

    @staticmethod
    def forward(
        ctx: Any, chunks: Chunks, waiting: WaitingGradient | None, *tensors: Tensor
    ) -> Tensor:
        """Compute the loss and the gradients; see [Note: Gradients in forward]."""
        # Not by `with`: [Note: Modes] in options.py.
        run = torch.autocast(tensors[0].device.type, enabled=False)(chunks.run)
        loss: Tensor = run(ctx.needs_input_grad[2:])
        ctx.waiting, ctx.shapes = waiting, [tensor.shape for tensor in tensors]
        ctx.gradients = chunks.buffers, chunks.targets
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by *grad_loss*, using them up unless the graph is kept."""
        if torch.is_grad_enabled():
            raise ConflictError(
                "create_graph=True differentiates the gradients again, but the chunked head loss "
                "keeps only the gradients themselves. Set head_loss='off' for training that needs "
                "second derivatives.",
                key="second-derivatives",
            )
        if ctx.gradients is None:
            raise ReleasedTensorError(
                "Trying to backward through the chunked head loss a second time: its gradients "
                "were handed over in the first backward. Pass retain_graph=True to that one.",
                key="backward-twice",
            )
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
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


class LinearChunks(Chunks):
    """Chunks through one matrix, with reused buffers; parameters are (V, D), and (V,) if biased."""

    def run(self, needs_grad: Sequence[bool]) -> Tensor:
        """Go through all chunks and return the loss."""
        hidden, weight, *biases = self.tensors
        dtype, num_vocab = self.compute_dtype, self.num_vocab
        self.weight = weight[:num_vocab].to(dtype)
        self.bias = biases[0][:num_vocab].to(dtype) if biases else None
        rows = min(self.plan.chunk_tokens, self.plan.num_tokens)
        self.logits = torch.empty(rows, num_vocab, dtype=dtype, device=hidden.device)
        return super().run(needs_grad)

    def _buffer(self, at: int, tensor: Tensor) -> GradientBuffer:
        """Return a buffer; that of weight and bias is cut to the vocabulary."""
        columns = tensor.shape[1] if tensor.dim() == 2 else 1
        valid = self.num_vocab if at else None
        buffer = GradientBuffer(tensor.shape[0], columns, tensor.dtype, tensor.device, valid)
        buffer.take_memory()
        return buffer

    def _project(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        hidden = self.tensors[0][start:stop].to(self.compute_dtype)
        out = self.logits[: stop - start]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out), hidden
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out), hidden

    def _add_gradients(self, grad: Tensor, kept: Tensor, room: Tensor, start: int) -> None:
        if grad.dtype.itemsize == 2 and not has_wide_products(grad):
            grad, kept = room.copy_(grad), kept.to(room.dtype)
        of_hidden, of_weight, *of_biases = self.buffers
        if of_hidden is not None:
            of_hidden.write_rows(start, wide_product(grad, self.weight))
        for of_bias in of_biases:
            if of_bias is not None:
                of_bias.add(grad.sum(dim=0, dtype=of_bias.wide_dtype))
        if of_weight is not None:
            of_weight.add_product(grad, kept)


class ModuleChunks(Chunks):
    """Chunks through a head that cannot be taken apart (LoRA on the head, quantised weights).

    Each chunk runs through the module itself, and its gradients come from autograd. Slower than
    :class:`LinearChunks` where the module has a large trainable matrix, whose gradient exists once
    more per chunk.

    Args:
        given: as for :class:`Chunks`; parameters that need no gradient are skipped.
        project: the head, which treats tokens one by one, draws no random numbers, and makes its
            result anew; called under the autocast state of now.
        sizes: as for :class:`Chunks`.
    """

    def __init__(self, *given: Any, project: Projection, **sizes: Any) -> None:
        super().__init__(*given, **sizes)
        autocast = autocast_of_now(self.tensors[0].device)
        # Not by `with`: [Note: Modes] in options.py.
        self._head = torch.enable_grad()(autocast(lambda rows: project(rows)[:, : self.num_vocab]))

    def _buffer(self, at: int, tensor: Tensor) -> GradientBuffer:
        return GradientBuffer.of(tensor)

    def _project(self, start: int, stop: int) -> tuple[Tensor, tuple[Tensor, GradientEdge | None]]:
        needs_grad = self.buffers[0] is not None
        rows = self.tensors[0][start:stop].detach().requires_grad_(needs_grad)
        output = self._head(rows)
        # Not the output itself, whose memory is free once it is cast.
        edge = get_gradient_edge(output) if output.requires_grad else None
        # Contiguous, since kernels that write in place go wrong on rows with gaps.
        return output.detach().contiguous(), (rows, edge)

    def _add_gradients(
        self, grad: Tensor, kept: tuple[Tensor, GradientEdge], room: Tensor, start: int
    ) -> None:
        rows, output = kept
        both = zip(self.buffers, [rows, *self.tensors[1:]], strict=True)
        wanted = [(buffer, tensor) for buffer, tensor in both if buffer is not None]
        tensors = [tensor for _, tensor in wanted]
        found = torch.autograd.grad([output], tensors, [grad], allow_unused=True)
        for (buffer, tensor), each in zip(wanted, found, strict=True):
            if each is not None and tensor is rows:
                buffer.write_rows(start, each)
            elif each is not None:
                buffer.add(each)
