"""Prevents a micro-batch that runs again from adding to a gradient twice.

[Note: Adding once]
A backward that fails has added to the gradients of some parameters, once each: autograd sums all
contributions of a graph to a parameter before it adds the sum. The next try computes the same bits,
so these gradients are final already. They are set aside while it runs. A tensor of one element that
is never read takes the place of each: if the micro-batch itself changes gradients (sets them to
zero, for instance), that tensor shows it, and the run ends. Backward writes to a new gradient,
which is freed at once, and the gradient that was set aside is put back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class AddedOnce:
    """Puts gradients aside until the next backward comes to them; see [Note: Adding once].

    Args:
        added: parameters, and the gradients to which backward has added.
    """

    def __init__(self, added: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self._added = list(added)
        self._handles: list[RemovableHandle] = []
        self.is_amiss = False
        """True if a gradient was touched otherwise, or backward did not come to it; at the end."""

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Put them aside inside of this context."""
        try:
            for parameter, gradient in self._added:
                placeholder = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
                parameter.grad = placeholder = placeholder.expand_as(gradient)
                before = functools.partial(self._before, parameter, placeholder, gradient)
                after = functools.partial(self._after, gradient)
                self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
            yield
        finally:
            try:
                self._put_back()
            finally:  # once more: it may have been interrupted
                self._put_back()

    def _put_back(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter, gradient in self._added:
            self.is_amiss |= parameter.grad is not gradient
            parameter.grad = gradient

    def _before(
        self,
        parameter: nn.Parameter,
        placeholder: torch.Tensor,
        gradient: torch.Tensor,
        _: torch.Tensor,
    ) -> None:
        if parameter.grad is not gradient:
            self.is_amiss |= parameter.grad is not placeholder or bool(placeholder._version)
            parameter.grad = None

    def _after(self, gradient: torch.Tensor, parameter: nn.Parameter) -> None:
        parameter.grad = gradient
