"""Calls of a head that are put off.

[Note: Calls through the head] A chunked loss needs the head's weight where the head's own call
would have it: moved by ``accelerate``, gathered by ZeRO-3 or FSDP, cast. So it runs *inside* a call
of the head: the innermost module's ``forward`` is exchanged for the length of that call, and every
wrapper and hook around it does its work as ever, in forward and, as the result is a tensor of the
graph, in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.integrations.exchanged_forwards import ExchangedForwards, Forward
from hf_pyao.integrations.output_head import OutputHead
from hf_pyao.losses.transforms import LogitTransform
from hf_pyao.losses.unchanged import Unchanged


@dataclass(frozen=True, kw_only=True)
class LossRequest:
    """A loss that the model's own code asked for, of logits that were put off."""

    labels: Tensor
    """(N,) int64."""
    transforms: tuple[LogitTransform, ...]
    """What the model did to its logits before."""
    num_valid_vocab: int
    """Columns that the model kept."""
    ignore_index: int
    """As in ``F.cross_entropy``."""
    reduction: str
    """``"mean"`` or ``"sum"``."""
    label_smoothing: float
    """As in ``F.cross_entropy``."""

    def options(self) -> dict[str, Any]:
        """Return what both chunked losses take by keyword."""
        names = ("transforms", "ignore_index", "reduction", "label_smoothing")
        return {name: getattr(self, name) for name in names}


class Backwards:
    """Counts backward passes through the losses of a head."""

    def __init__(self) -> None:
        self.num = 0

    def count(self, grad: Tensor) -> None:
        """Count one more; a hook on the loss."""
        self.num += 1


ComputeLoss = Callable[["PutOffCall", Tensor, LossRequest], Tensor]


class PutOffCall:
    """One call of a head that was put off; what :class:`DeferredLogits` works with.

    Args:
        head: the head.
        hidden: (..., D) hidden states as the innermost module got them.
        num_vocab: columns of the logits.
        dtype: what the head would have returned.
        device: where.
        own_forward: the innermost module's.
        exchanged: exchanges it for the length of a call.
        backwards: counts the backwards of this head's losses.
        compute_loss: runs inside the head's call; see [Note: Calls through the head].
        note_reading: told if the logits are needed although the loss was taken without them.
    """

    def __init__(
        self,
        head: OutputHead,
        hidden: Tensor,
        *,
        num_vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        own_forward: Forward,
        exchanged: ExchangedForwards,
        backwards: Backwards,
        compute_loss: ComputeLoss,
        note_reading: Callable[[], None],
    ) -> None:
        self.head = head
        self.num_vocab = num_vocab
        self.dtype = dtype
        self.device = device
        self.own_forward = own_forward
        self.requires_grad = hidden.requires_grad or bool(head.trainable())
        self.computed_for: str | None = None
        """What made the logits be computed after all, if anything did."""
        self.loss_taken = False
        """Whether the model took a loss in chunks, and one that has gradients."""
        self._exchanged = exchanged
        self._compute_loss = compute_loss
        self._note_reading = note_reading
        device_type = hidden.device.type
        self._autocast = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
        )
        # Gathered parameters are other tensors at every call; there the steps of training tell.
        watched = [] if head.is_gathered else [hidden, *head.inner.parameters()]
        self._unchanged = Unchanged(watched)
        self._is_gathered = head.is_gathered
        self._backwards, self._num_backwards = backwards, backwards.num

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        """Call the head as the model would have, under the autocast state of then.

        Raises:
            SavedTensorModifiedError: the head or the hidden states have changed since, or may have.
        """
        self._check_unchanged(reason)
        if self.loss_taken:
            self._note_reading()
        if self.computed_for is None:
            self.computed_for = reason
        return self._call_head(hidden, self.own_forward)

    def _check_unchanged(self, reason: str) -> None:
        late = f"outputs.logits was first read (for {reason!r}) after"
        remedy = "or set head_loss='off'."
        if self._is_gathered and self._backwards.num != self._num_backwards:
            raise SavedTensorModifiedError(
                f"{late} a backward pass, and the model's head is sharded: whether its weight is "
                "still that of the forward cannot be told, and other logits might come out. Read "
                f"outputs.logits before backward, {remedy}"
            )
        if not self._unchanged.holds():
            raise SavedTensorModifiedError(
                f"{late} the model's head or its hidden states had changed, by an optimizer step "
                "most likely; the logits of the forward can no longer be computed. Read "
                f"outputs.logits before the step, {remedy}"
            )

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of (N, D) hidden states and (N,) labels, without their logits."""
        request = LossRequest(labels=labels, **options)

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self._compute_loss(self, hidden, request)

        loss = self._call_head(hidden, forward)
        if loss.requires_grad or not self.requires_grad:
            self.loss_taken = True
            self._unchanged.take_samples()  # from now on the logits may be read late
        if self._is_gathered and loss.requires_grad:
            loss.register_hook(self._backwards.count)  # type: ignore[no-untyped-call]
        return loss

    def _call_head(self, hidden: Tensor, forward: Forward) -> Tensor:
        device_type, dtype, enabled = self._autocast
        # Not by `with`: [Note: Modes] in losses/options.py.
        call = torch.autocast(device_type, dtype=dtype, enabled=enabled)(self._exchanged.during)
        result: Tensor = call([(self.head.inner, forward)], self.head.outer, hidden)
        return result
