"""Linear layers of a function that runs in slices: sums of their gradients, and the last product.

[Note: Products into sums] Autograd would make a gradient of each weight for each slice: as many
bytes as the weight, rounded to its dtype, to be added to the sum and dropped. Where a slice's
linear layer has such a weight, :class:`Linears` runs it as a function of ours instead, whose
backward adds the product to the sum in place. Half precision is rounded once then, at the end.

[Note: Last products] A slice runs again for its gradients. A linear layer needs its input and
weight for them, but not its output. Neither do views of the output, or dropout, which are the most
that an MLP does after its last linear layer. So a second run leaves the last product out. Which one
is last, and what follows it, is seen once, when the function's first slice runs in its first
forward. If something else follows it later, all slices run again from the first, with all products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_pyao.model.gradient_buffer import GradientBuffer

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

    def end(self, last: int) -> None:
        """Note which linear layer is the last."""
        self.last = last


class Linears(TorchFunctionMode):
    """While active, linear layers add their weights' gradients to *sums* in their backward.

    The last one does nothing else, if *ending* says that its product need not be there. Autocast
    casts the operands of a linear layer first; under it they are left alone.

    Args:
        ending: what is known of the function.
        sums: by the ids of weights; None: the first run, of which the end is seen.
    """

    def __init__(self, ending: Ending, sums: Mapping[int, GradientBuffer] | None = None) -> None:
        super().__init__()
        self._ending = ending
        self._sums = sums
        self._num_linears = 0
        self._left_out: Any = None
        """The node of the last product, where that was left out."""
        self._is_asked_for = True
        """Whether something has looked at what the last linear layer returned."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run *func*, or what stands for it.

        Raises:
            NeedsValuesError: it may ask for the product that was left out.
        """
        given = kwargs or {}
        is_linear = func in _LINEAR
        is_asked_for = is_linear or _needs_values(func, args, given)
        if self._left_out is not None and is_asked_for:
            raise NeedsValuesError
        self._is_asked_for = not is_linear and (self._is_asked_for or is_asked_for)
        self._num_linears += is_linear
        if is_linear and self._sums is not None:
            is_last = self._num_linears == self._ending.last and torch.is_grad_enabled()
            found = _operands(func, args, given)
            if found is not None and _is_plain(*found):
                sums = [self._sums.get(id(each)) for each in found[1:]]
                if is_last or any(each is not None for each in sums):
                    return self._run(func, found, sums, is_last=is_last)
        return func(*args, **given)

    def _run(
        self, func: Any, operands: tuple[Any, ...], sums: Sequence[Any], *, is_last: bool
    ) -> Tensor:
        inputs, weight, bias = operands
        lead = inputs.shape[:-1]
        rows = inputs if len(lead) == 1 else inputs.reshape(-1, inputs.shape[-1])
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, func is torch.addmm, *sums, is_last
        )
        self._left_out = output.grad_fn if is_last else None
        # Viewed here: what a function of ours returns as a view none may write to.
        return output if len(lead) == 1 else output.view(*lead, output.shape[-1])

    def note_ending(self) -> None:
        """Note where the last linear layer stands, once the function has returned."""
        self._ending.end(0 if self._is_asked_for else self._num_linears)

    def check(self, output: Tensor) -> None:
        """Look that only views and dropout lead from a product left out to *output*.

        Raises:
            NeedsValuesError: something else does.
        """
        here = output.grad_fn
        while self._left_out is not None and here is not self._left_out:
            if here is None or here.name() not in _VALUE_FREE_NODES:
                raise NeedsValuesError
            here = here.next_functions[0][0]


def _needs_values(func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Say whether a call of *func*, or its gradient, may look at what it is given."""
    if func is F.dropout:
        return bool(args[3] if len(args) > 3 else given.get("inplace"))
    return func not in _VALUE_FREE


def _operands(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    """Return input, weight and bias of a linear layer, if it is called in the usual way."""
    if func is torch.addmm:
        return (args[1], args[2], args[0]) if len(args) == 3 and not kwargs else None
    names = ("input", "weight", "bias")
    if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
        return None
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "input" not in given or "weight" not in given:
        return None
    return given["input"], given["weight"], given.get("bias")


def _is_plain(inputs: Any, weight: Any, bias: Any) -> bool:
    """Whether these are matrices of one dtype that nothing is going to cast."""
    tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
    return (
        all(isinstance(tensor, Tensor) for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and weight.dim() == 2
        and (bias is None or bias.dim() == 1)
        and not torch.is_autocast_enabled(inputs.device.type)
    )


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
