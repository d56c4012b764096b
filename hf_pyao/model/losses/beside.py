"""Logits that were computed in addition to a loss which does not use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_pyao.errors import ConflictError


class LogitsBesideLoss(Tensor):
    """Logits that were read after their loss had been taken in chunks.

    A tensor like any other, in the graph, so that a second loss of it has its gradient. But the
    first loss has none to give to it: what asks for that gradient (a hook, ``retain_grad``,
    ``autograd.grad``, ``backward(inputs=...)``) is refused, where it would otherwise see nothing,
    or a part. Results of operations on it are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run *func* as on a plain tensor; refuse to differentiate with respect to one of these."""
        named = dict(kwargs or {})
        if func is torch.autograd.grad:
            wanted = named.get("inputs", args[1] if len(args) > 1 else ())
            several = [wanted] if isinstance(wanted, Tensor) else wanted
            if any(isinstance(item, cls) for item in several):
                _refuse("torch.autograd.grad(..., outputs.logits)")
        return torch._C._disabled_torch_function_impl(func, (), tuple(args), named)

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: the hook would miss the gradient of the loss."""
        _refuse("outputs.logits.register_hook()")

    def retain_grad(self) -> NoReturn:
        """Refuse: the gradient would lack the share of the loss."""
        _refuse("outputs.logits.retain_grad()")

    @property
    def grad(self) -> Tensor | None:
        """None, as of any tensor in the middle of a graph; refused after ``backward(inputs=)``."""
        if self.retains_grad:
            _refuse("outputs.logits.grad")
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        descriptor: Any = Tensor.grad
        descriptor.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


def beside_loss(logits: Tensor) -> Tensor:
    """Return *logits* as what refuses to be asked for the gradient of the loss.

    Tensors outside of graphs are refused by torch; those of other classes are left as they are.
    """
    if type(logits) is Tensor and logits.requires_grad:
        return logits.as_subclass(LogitsBesideLoss)
    return logits


def _refuse(asked: str) -> NoReturn:
    raise ConflictError(
        f"{asked} asks for the gradient of the loss with respect to logits, but the chunked head "
        "loss was computed without them (they were computed beside it when they were read), so "
        "that none arrives there. Set head_loss='off' for training that needs it.",
        key="logits-gradient",
    )
