"""Linear layers of a function that runs in slices: sums of their gradients, and the last product.

[Note: Products into sums] Autograd would make a gradient of each weight for each slice: as many
bytes as the weight, rounded to its dtype, to be added to the sum and dropped. Where a slice's
linear layer has such a weight, :class:`Linears` runs it as a function of ours instead, whose
backward adds the product to the sum in place. Half precision is rounded once then, at the end.

[Note: Last products] A slice runs again for its gradients. A linear layer needs its input and
weight for them, but not its output. Neither do views of the output, or dropout, which are the most
that an MLP does after its last linear layer. So a second run leaves the last product out. Whether
that holds is seen once for each kind of MLP, in the graph of a few tokens; not for one that asks
for values in Python. If a second run has another end, all slices run again from the first, with all
products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_pyao.model.gradient_buffer import GradientBuffer

_VALUE_FREE_NODES = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "NativeDropoutBackward0",
    }
)
"""Nodes of functions whose gradient needs no values of what they are given."""

_QUESTIONS = frozenset(
    {Tensor.item, Tensor.tolist, Tensor.numpy, torch.equal, torch.allclose, Tensor.__bool__}
    | {Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__contains__}
)
"""Functions that tell Python of values."""


class NeedsValuesError(Exception):
    """Something may need the product that was left out."""


class Linears(TorchFunctionMode):
    """While active, linear layers add their weights' gradients to *sums* in their backward.

    Autocast casts the operands of a linear layer first; under it they are left alone.

    Args:
        sums: by the ids of weights.
        left_out: which linear layer, counted from 1, returns no values; 0: none.
    """

    def __init__(self, sums: Mapping[int, GradientBuffer], left_out: int = 0) -> None:
        super().__init__()
        self.num_linears = 0
        self._node: Any = None
        self._is_asked = False
        self._sums = sums
        self._left_out = left_out

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run *func*, or what stands for it."""
        if func is not F.linear and func is not torch.addmm:
            self._is_asked = self._is_asked or func in _QUESTIONS
            return func(*args, **(kwargs or {}))
        self.num_linears += 1
        output = self._run(func, args, kwargs or {})
        self._node = output.grad_fn
        return output

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        is_left_out = self.num_linears == self._left_out
        operands = _operands(func, args, kwargs)
        sums = [self._sums.get(id(each)) for each in operands[1:]]
        if not operands or not (is_left_out or any(each is not None for each in sums)):
            output: Tensor = func(*args, **kwargs)
            return output
        inputs, weight, bias = operands
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = _Linear.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, func is torch.addmm, *sums, is_left_out
        )
        # Viewed here: what a function of ours returns as a view none may write to.
        return output.view(*inputs.shape[:-1], output.shape[-1])

    def end_with(self, output: Tensor) -> bool:
        """Say whether nothing but views and dropout leads from the last of them to *output*.

        False, too, if Python was told of values.
        """
        here: Any = output.grad_fn
        while here not in (None, self._node) and here.name() in _VALUE_FREE_NODES:
            here = here.next_functions[0][0]
        return here is not None and here is self._node and not self._is_asked


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return input, weight and bias of a linear layer; nothing if they are cast, or no matrices."""
    if func is torch.addmm:
        given = dict(zip(("bias", "input", "weight"), args, strict=False))
        given = {} if len(args) != 3 or kwargs else given
    else:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    inputs: Any = given.get("input")
    weight: Any = given.get("weight")
    bias: Any = given.get("bias")
    tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
    is_plain = (
        all(isinstance(tensor, Tensor) for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and weight.dim() == 2
        and (bias is None or bias.dim() == 1)
        and not torch.is_autocast_enabled(inputs.device.type)
    )
    return (inputs, weight, bias) if is_plain else ()


class _Linear(torch.autograd.Function):
    """``F.linear(inputs, weight, bias)`` of rows, or ``addmm`` with the weight transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_transposed: bool,
        sum_of_weight: GradientBuffer | None,
        sum_of_bias: GradientBuffer | None,
        is_left_out: bool,
    ) -> Tensor:
        """Run the layer; if it *is_left_out*, return zeros in the shape of what it would return."""
        ctx.save_for_backward(inputs if sum_of_weight is not None else None, weight)
        ctx.options = (is_transposed, sum_of_weight, sum_of_bias)
        if is_left_out:
            size = weight.shape[1 if is_transposed else 0]
            return inputs.new_zeros(()).expand(inputs.shape[0], size)
        if is_transposed:
            assert bias is not None
            return torch.addmm(bias, inputs, weight)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the input's gradient; add the others to their sums."""
        inputs, weight = ctx.saved_tensors
        is_transposed, sum_of_weight, sum_of_bias = ctx.options
        if sum_of_weight is not None:
            sum_of_weight.add_product(*((inputs, grad) if is_transposed else (grad, inputs)))
        if sum_of_bias is not None:
            sum_of_bias.add(grad.sum(0, dtype=sum_of_bias.wide_dtype))
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = torch.mm(grad, weight.t() if is_transposed else weight)
        return of_inputs, None, None, None, None, None, None
