"""Calls of a head that are put off.

[Note: Calls through the head] A chunked loss needs the head's weight where the head's own call
would have it: moved by ``accelerate``, gathered by ZeRO-3 or FSDP, cast. So it runs *inside* a call
of the head: the innermost module's ``forward`` is exchanged for the length of that call. Every
wrapper and hook around it works as usual in forward and, since the result is a tensor of the graph,
in backward.

[Note: A head of an FSDP2 unit] ``fully_shard([norm, head])`` makes one unit of several modules, as
Accelerate does. The call that is put off ends the unit's forward. A second call of the head would
begin another one: FSDP2 puts a node on the hidden states that it gets, and reshards the unit when
backward reaches that node. That is before the norm's backward, which would read freed weights. The
first call has such a node already, where it belongs. So a head that is an FSDP2 unit, or a part of
one, is not called again. Its weights are gathered by ``FSDPModule.unshard`` instead: for the loss,
and again before backward goes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_pyao.engine.weights.tables import held_on_device
from hf_pyao.errors import ConflictError, SavedTensorModifiedError
from hf_pyao.model.head.output_head import PLAIN, OutputHead
from hf_pyao.model.losses.options import autocast_of_now
from hf_pyao.model.losses.tied_embedding import WaitingGradient, tie, tied_embedding
from hf_pyao.model.patching.exchanged_forwards import ExchangedForwards, Forward, own_forward


class _Steps:
    """Counts the steps of all optimizers; fused ones write without a version telling."""

    num = 0

    @classmethod
    def count(cls, *_: Any) -> None:
        """Count one."""
        cls.num += 1


register_optimizer_step_post_hook(_Steps.count)

ComputeLoss = Callable[["PutOffCall", Tensor, Tensor, dict[str, Any]], Tensor]
"""Takes the call, hidden states (N, D), labels (N,), and fields of the loss's options."""


@dataclass
class HeadRun:
    """What the calls of the head in one forward of the model share.

    Each :class:`PutOffCall` refers to it, so it must not refer to them: the hidden states that a
    call holds would then be freed by Python's cyclic collector alone.
    """

    head: OutputHead
    exchanged: ExchangedForwards
    """Exchanges the head's ``forward`` for the length of a call."""
    compute_loss: ComputeLoss
    """Runs inside the head's call; see [Note: Calls through the head]."""
    note_reading: Callable[[], None]
    """Told if the logits are needed although the loss was taken without them."""
    num_items: Tensor | float | None
    """What the model will divide a summed loss by."""
    without_gradients: bool
    """Whether the loss is taken in chunks where gradients are off, too."""
    tied: tuple[Tensor, WaitingGradient] | None = None
    """Alias of the weight that embedding and head share, once the embedding has been called."""

    def embed(self, embedding: nn.Embedding) -> Forward:
        """Return a ``forward`` for a tied embedding whose gradient joins the head's."""
        own = own_forward(embedding)

        def forward(ids: Tensor) -> Any:
            if not torch.is_grad_enabled():
                return own(ids)
            if self.tied is None:
                self.tied = tie(embedding.weight)
            alias, waiting = self.tied
            return tied_embedding(ids, alias, embedding.padding_idx, waiting)

        return forward


class PutOffCall:
    """One call of a head that was put off; what :class:`DeferredLogits` works with.

    Args:
        run: of the model's forward.
        hidden: (..., D) hidden states as the innermost module got them.
    """

    def __init__(self, run: HeadRun, hidden: Tensor) -> None:
        head = run.head
        self.run = run
        self.own_forward = head.own_forward()
        self.num_vocab, self.dtype, self.device = head.result_of(hidden)
        self.without_gradients = run.without_gradients
        can_require = torch.is_grad_enabled() or not run.without_gradients
        self.requires_grad = can_require and (hidden.requires_grad or bool(head.trainable()))
        self.computed_for: str | None = None
        """What made the logits be computed after all, if anything did."""
        self.loss_taken = False
        """Whether the model took a loss in chunks, and one that has gradients."""
        self.is_over = False
        """Whether the model's forward has ended."""
        self._autocast = autocast_of_now(hidden.device)
        # Gathered parameters have other versions at every call.
        parameters = [] if head.is_gathered else head.inner.parameters()
        self._versions = [(tensor, tensor._version) for tensor in (hidden, *parameters)]
        self._num_steps = _Steps.num

    def end(self) -> None:
        """Note that the model's forward has ended: no loss is taken in chunks any more."""
        self.is_over = True

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        """Call the head as the model would have, under the autocast state of then.

        Once the loss is taken the result is not part of its graph, and refuses to be part of
        another one's; see :class:`_AfterLoss`.

        Raises:
            SavedTensorModifiedError: an optimizer has stepped since, or the head or the hidden
                states have changed, or the head was sharded again.
        """

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_changed = any(each._version != version for each, version in self._versions)
            if (
                is_changed
                or self._num_steps != _Steps.num
                or not self.run.head.has_plain_parameters
            ):
                raise SavedTensorModifiedError(
                    f"outputs.logits was first read (for {reason!r}) after an optimizer had "
                    "stepped, or the model's head or its hidden states had changed, or the head "
                    "had been sharded again; the logits of the forward can no longer be computed. "
                    "Read outputs.logits before the step (of a head that FSDP shards: before "
                    "backward), or set head_loss='off'.",
                    key="logits-after-change",
                )
            return self.own_forward(hidden, *args, **kwargs)

        if self.computed_for is None:
            self.computed_for = reason
        if not self.loss_taken:
            return self._call_head(hidden, forward)
        self.run.note_reading()
        # Not by `with`: [Note: Modes] in model/losses/options.py.
        logits = torch.no_grad()(self._call_head)(hidden, forward)
        if self.requires_grad:
            anchor = logits.new_empty(0, requires_grad=True)
            logits = _AfterLoss.apply(logits.data, anchor)  # type: ignore[no-untyped-call]
        return logits

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of (N, D) hidden states and (N,) labels, without their logits.

        Args:
            hidden: (N, D).
            labels: (N,) int64.
            options: fields of the loss's options.
        """

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with held_on_device(self.run.head.inner):  # chunks may read its weight several times
                return self.run.compute_loss(self, hidden, labels, options)

        loss = self._call_head(hidden, forward)
        # One without gradients, of logits that have them, is no loss to train with.
        self.loss_taken |= loss.requires_grad or not self.requires_grad
        return loss

    def _call_head(self, hidden: Tensor, forward: Forward) -> Tensor:
        # Not by `with`: [Note: Modes] in model/losses/options.py.
        if (unit := self.run.head.fsdp2_unit) is not None:
            return _with_gathered(unit, self._autocast(forward), hidden)
        call = self._autocast(self.run.exchanged.during)
        result: Tensor = call([(self.run.head.inner, forward)], self.run.head.outer, hidden)
        return result


class _AfterLoss(torch.autograd.Function):
    """Logits that were read after their loss had been taken without them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, anchor: Tensor) -> Tensor:
        """Return *logits*; *anchor* makes them part of a graph."""
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        """Refuse: the gradient would be lost."""
        raise ConflictError(
            "a loss of outputs.logits goes through backward, but the model's own loss was taken "
            "without them, and they were computed when they were read, without a graph. Set "
            "head_loss='off' for losses of the logits (distillation, a penalty on them).",
            key="logits-gradient",
        )


def _with_gathered(unit: Any, forward: Forward, hidden: Tensor) -> Tensor:
    """Run *forward* while *unit* is gathered; see [Note: A head of an FSDP2 unit]."""
    was_gathered = all(type(parameter) in PLAIN for parameter in unit.parameters(recurse=False))
    unit.unshard()
    try:
        result: Tensor = forward(hidden)
    finally:
        if not was_gathered:
            unit.reshard()
    if result.requires_grad:
        result.register_hook(lambda _: unit.unshard())  # type: ignore[no-untyped-call]
    return result
