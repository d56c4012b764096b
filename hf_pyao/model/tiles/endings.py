"""Finds a function's last linear layer, whose output second runs need not compute.

[Note: Last products] A tile runs again for its gradients. A linear layer needs its input and weight
for them, but not its output. Neither do views of the output, or dropout, which are the most that an
MLP does after its last linear layer. So a second run leaves the last product out. Which one is
last, and what follows it, is recorded once, when the function's first tile runs in its first
forward. If something else follows it later, all tiles run again from the first, with all products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LINEAR: tuple[Any, ...] = (F.linear, torch.addmm)

_FACTS: tuple[Any, ...] = (
    *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout, Tensor.ndim, Tensor.requires_grad),
    *(Tensor.grad_fn, Tensor.is_cuda, Tensor.is_cpu, Tensor.is_meta, Tensor.is_leaf),
)
_VALUE_FREE: frozenset[Any] = frozenset(
    {Tensor.view, Tensor.reshape, Tensor.size, Tensor.dim, F.dropout, torch.native_dropout}
    | {fact.__get__ for fact in _FACTS}
)
"""Functions whose gradient needs no values of what they are given, and which look at none."""

_VALUE_FREE_NODES = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "NativeDropoutBackward0",
        "MulBackward0",  # of dropout on a CPU: by a mask
    }
)
"""What stands for them in the graph."""


class NeedsValuesError(Exception):
    """Something asks for the product that was left out."""


class Ending:
    """What is known of the end of a function; for all of its calls."""

    last: int | None = None
    """Which of its linear layers, counted from 1, is the last, and may be left out; 0: none may.
    None: it did not run yet."""

    def leave_out_none(self) -> None:
        """Compute all products from now on: something asked for one that was left out."""
        self.last = 0


def is_linear(func: Callable[..., Any]) -> bool:
    """Say whether *func* is what linear layers call."""
    return func in _LINEAR


def needs_values(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bool:
    """Say whether a call of *func*, or its gradient, may look at what it is given."""
    if func is F.dropout:
        return bool(args[3] if len(args) > 3 else (kwargs or {}).get("inplace"))
    return func not in _VALUE_FREE


def check_way(output: Tensor, node: Any) -> None:
    """Look that only views and dropout lead from *node*, a product left out, to *output*.

    Raises:
        NeedsValuesError: something else does.
    """
    here = output.grad_fn
    while here is not node:
        if here is None or here.name() not in _VALUE_FREE_NODES:
            raise NeedsValuesError
        here = here.next_functions[0][0]


class SeenEnding(TorchFunctionMode):
    """While active, sees which linear layer comes last, and what comes behind it."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self._ending = ending
        self._num_linears = 0
        self._is_asked_for = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run *func*, and record it."""
        if is_linear(func):
            self._num_linears += 1
            self._is_asked_for = False
        elif needs_values(func, args, kwargs):
            self._is_asked_for = True
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        """Find where the last linear layer stands, once the function has returned."""
        self._ending.last = 0 if self._is_asked_for else self._num_linears
