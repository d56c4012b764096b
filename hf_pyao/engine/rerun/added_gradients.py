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
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class _Aside:
    """A gradient that is put aside."""

    def __init__(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self.parameter = parameter
        self.gradient = gradient
        self.placeholder = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(
            gradient
        )
        self.is_back = False
        self.is_touched = False


class AddedOnce:
    """Puts gradients aside until the next backward comes to them; see [Note: Adding once].

    Used as a context around the next try, whether that succeeds or not.

    Args:
        added: parameters, and the gradients to which backward has added.
    """

    def __init__(self, added: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self._added = list(added)
        self._aside: list[_Aside] = []

    def __enter__(self) -> AddedOnce:
        """Put the gradients aside."""
        try:
            for parameter, gradient in self._added:
                aside = _Aside(parameter, gradient)
                self._aside.append(aside)
                parameter.grad = aside.placeholder
                before, after = functools.partial(_before, aside), functools.partial(_after, aside)
                parameter.register_hook(before)  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Put back what has not come back; an interrupt is raised when that is done."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise
        self._added.clear()

    def _put_back(self) -> None:
        """Do so; it may be called again, where it was interrupted."""
        for aside in self._aside:
            _take_off(aside)
            if not aside.is_back:
                aside.is_touched |= _is_touched(aside)
                aside.parameter.grad = aside.gradient

    @property
    def is_amiss(self) -> bool:
        """True if a gradient was touched otherwise, or backward did not come to it; at the end."""
        return any(aside.is_touched or not aside.is_back for aside in self._aside)


def _take_off(aside: _Aside) -> None:
    """Remove the hooks of *aside*: by what they are, as an interrupt may come before a handle."""
    parameter: Any = aside.parameter
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for key, hook in list((hooks or {}).items()):
            if isinstance(hook, functools.partial) and hook.args[:1] and hook.args[0] is aside:
                del hooks[key]


def _is_touched(aside: _Aside) -> bool:
    return aside.parameter.grad is not aside.placeholder or bool(aside.placeholder._version)


def _before(aside: _Aside, _: torch.Tensor) -> None:
    if not aside.is_back:
        aside.is_touched |= _is_touched(aside)
        aside.parameter.grad = None


def _after(aside: _Aside, _: torch.Tensor) -> None:
    if not aside.is_back:
        aside.parameter.grad = aside.gradient
        aside.is_back = True
