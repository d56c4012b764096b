"""A model's output head: what it is, whether its loss can be chunked, and calls that are put off.

[Note: Calls through the head] A chunked loss needs the head's weight where the head's own call
would have it: moved by ``accelerate``, gathered by ZeRO-3 or FSDP, cast. So it runs *inside* a call
of the head: the innermost module's ``forward`` is exchanged for the length of that call, and every
wrapper and hook around it does its work as ever, in forward and, as the result is a tensor of the
graph, in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.errors import SavedTensorModifiedError
from hf_pyao.integrations.wrappers import wrapped_module
from hf_pyao.losses.transforms import LogitTransform

Forward = Callable[..., Any]

_MISSING = object()


@dataclass(frozen=True)
class OutputHead:
    """A head whose loss can be computed in chunks."""

    outer: nn.Module
    """What the model calls, wrappers included."""
    inner: nn.Module
    """What projects: a linear layer, or a module that is run as it is."""
    is_linear: bool
    """Whether *inner* computes ``F.linear(hidden, weight, bias)`` and nothing else."""
    is_sharded: bool
    """Whether a library gathers its weight for each call."""

    def own_forward(self) -> Forward:
        """Return the ``forward`` that *inner* has now."""
        forward: Forward = self.inner.forward
        return forward

    def trainable(self) -> list[Tensor]:
        """Return the parameters of *inner* that want a gradient."""
        return [parameter for parameter in self.inner.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class NotUnderstood:
    """Why a head keeps its own loss."""

    reason: str


def understand_head(head: nn.Module | None) -> OutputHead | NotUnderstood:
    """Decide whether the loss of *head* can be computed in chunks.

    Linear layers can (bias or not, tied or not, sharded or not), and so can PEFT's layers around
    one and subclasses of ``nn.Linear`` with a ``forward`` of their own (quantised weights), as
    long as every token is projected by itself and nothing is drawn at random.
    """
    if head is None:
        return NotUnderstood("get_output_embeddings() returns none")
    inner = _innermost(head)
    if inner is None:
        return NotUnderstood(f"its head is a compiled {type(head).__name__}")
    is_sharded = _is_sharded(inner)
    if not is_sharded and (hooked := _first_with_hooks(head, inner)) is not None:
        return NotUnderstood(f"its head ({type(hooked).__name__}) has module hooks")
    has_own_class = type(inner).forward is nn.Linear.forward
    if has_own_class and "forward" not in inner.__dict__:
        return OutputHead(head, inner, is_linear=True, is_sharded=is_sharded)
    package = type(inner).__module__.partition(".")[0]
    if not isinstance(inner, nn.Linear) and package != "peft":
        return NotUnderstood(f"its head is a {type(inner).__name__}, not a linear layer")
    if is_sharded:
        return NotUnderstood(f"its head is a sharded {type(inner).__name__}")
    if dropout := _active_dropout(inner):
        return NotUnderstood(
            f"its head has dropout (p={dropout}), which would be drawn chunk by chunk; "
            "set it to 0 for the head"
        )
    return OutputHead(head, inner, is_linear=False, is_sharded=False)


def _innermost(head: nn.Module) -> nn.Module | None:
    """Return what projects inside wrappers; None inside a compiled one, which runs another code."""
    while True:
        if hasattr(head, "_orig_mod"):
            return None
        inner = wrapped_module(head) or _saved_by_peft(head)
        if inner is None:
            return head
        head = inner


def _saved_by_peft(head: nn.Module) -> nn.Module | None:
    """Return the copy that PEFT's ``modules_to_save`` trains, or the original if switched off."""
    if not any(cls.__name__ == "ModulesToSaveWrapper" for cls in type(head).__mro__):
        return None
    wrapper: Any = head
    if wrapper.disable_adapters or not wrapper.active_adapters:
        original: nn.Module = wrapper.original_module
        return original
    active: nn.Module = wrapper.modules_to_save[wrapper.active_adapters[0]]
    return active


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 gathers the parameters of *module* in hooks around its calls."""
    fully_sharded = any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
    return fully_sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _first_with_hooks(head: nn.Module, inner: nn.Module) -> nn.Module | None:
    """Return a module from *head* to *inner* whose hooks would see the loss instead of logits."""
    for module in (head, inner):
        hooks: Any = module
        if (
            hooks._forward_hooks
            or hooks._forward_pre_hooks
            or hooks._backward_hooks
            or hooks._backward_pre_hooks
        ):
            return module
    return None


def _active_dropout(module: nn.Module) -> float:
    kind = nn.modules.dropout._DropoutNd
    dropouts = [child for child in module.modules() if isinstance(child, kind)]
    return max((child.p for child in dropouts if child.training), default=0.0)


@contextmanager
def forward_replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Exchange the ``forward`` of this one module; restored on any exit."""
    previous = module.__dict__.get("forward", _MISSING)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if previous is _MISSING:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = previous


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
        """Whether the model took a loss in chunks."""
        self._compute_loss = compute_loss
        self._note_reading = note_reading
        device_type = hidden.device.type
        self._autocast = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
        )
        # Gathered parameters are other tensors, or other versions of them, at every call.
        watched = [] if head.is_sharded else [hidden, *head.inner.parameters()]
        self._versions = [(tensor, tensor._version) for tensor in watched]

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        """Call the head as the model would have, under the autocast state of then.

        Raises:
            SavedTensorModifiedError: the head or the hidden states have changed since.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise SavedTensorModifiedError(
                f"outputs.logits was first read (for {reason!r}) after the model's head or its "
                "hidden states had changed, by an optimizer step most likely; the logits of the "
                "forward can no longer be computed. Read outputs.logits before the step, or set "
                "head_loss='off'."
            )
        if self.loss_taken:
            self._note_reading()
        if self.computed_for is None:
            self.computed_for = reason
        device_type, dtype, enabled = self._autocast
        with (
            torch.autocast(device_type, dtype=dtype, enabled=enabled),
            forward_replaced(self.head.inner, self.own_forward),
        ):
            logits: Tensor = self.head.outer(hidden)
        return logits

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of (N, D) hidden states and (N,) labels, without their logits."""
        request = LossRequest(labels=labels, **options)

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return self._compute_loss(self, hidden, request)

        device_type, dtype, enabled = self._autocast
        with (
            torch.autocast(device_type, dtype=dtype, enabled=enabled),
            forward_replaced(self.head.inner, forward),
        ):
            loss: Tensor = self.head.outer(hidden)
        self.loss_taken = True
        return loss
