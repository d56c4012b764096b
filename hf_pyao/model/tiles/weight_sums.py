"""Gradients of weights, summed over tiles.

[Note: Products into sums] Autograd would make a gradient of each weight for each tile: as many
bytes as the weight, rounded to its dtype, to be added to the sum and dropped. Where a tile's linear
layer has such a weight, :class:`SummedProducts` runs it as a function of ours instead, whose
backward adds the product to the sum in place. Half precision is rounded once then, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_pyao.model.gradient_buffer import GradientBuffer
from hf_pyao.model.tiles.endings import Ending, NeedsValuesError, check_way, is_linear, needs_values


class WeightSums:
    """Sums of gradients, one for each of *weights*.

    Those of 16 bits are summed in float32, in the bytes of the result and as many beside it (see
    [Note: Where the wide sum lives] in ``gradient_buffer``); all others in their own dtype. They
    live for as long as one call's backward.

    Args:
        weights: what the gradients are of.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._sums = [_Sum(weight) for weight in weights]
        self._by_id = {id(weight): total for weight, total in zip(weights, self._sums, strict=True)}

    def of(self, weight: Any) -> _Sum | None:
        """Return the sum that belongs to *weight*, if there is one."""
        return self._by_id.get(id(weight))

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one tile; None adds nothing."""
        storages: set[int] = set()
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.add(_own(gradient, storages))

    def finish(self) -> list[Tensor | None]:
        """Return the sums, each in its weight's dtype and shape; None where nothing was added."""
        return [total.finish() for total in self._sums]


class _Sum:
    """The sum of one weight's gradients."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._is_narrow = weight.dtype.itemsize < torch.float32.itemsize
        self._total: Tensor | None = None
        self._buffer: GradientBuffer | None = None

    def add(self, gradient: Tensor) -> None:
        """Add *gradient*, of any floating dtype, which nobody else looks into."""
        if self._is_narrow:
            self._wide().add(gradient)
        elif self._total is None:
            self._total = gradient.to(self._weight.dtype)
        else:
            self._total += gradient

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``: (n, rows) and (n, columns), both of the weight's dtype."""
        if self._is_narrow:
            self._wide().add_product(left, right)
        elif self._total is None:
            self._total = torch.mm(left.t(), right)
        else:
            # Not addmm_, which counters of operations do not know.
            torch.addmm(self._total, left.t(), right, out=self._total)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum of (n, elements) over n."""
        self.add(rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)))

    def finish(self) -> Tensor | None:
        """Return the sum; None where nothing was added."""
        if self._buffer is None:
            return self._total
        one = torch.ones((), dtype=torch.float32, device=self._weight.device)
        return self._buffer.finish(one, keep=False).view(self._weight.shape)

    def _wide(self) -> GradientBuffer:
        if self._buffer is None:
            weight = self._weight
            rows = weight.shape[0] if weight.dim() == 2 else 1
            columns = weight.numel() // max(rows, 1)
            self._buffer = GradientBuffer(rows, columns, weight.dtype, weight.device)
        return self._buffer


def _own(gradient: Tensor, storages: set[int]) -> Tensor:
    """Return *gradient* as a tensor that may be added to: one that nobody else looks into."""
    storage = gradient.untyped_storage()
    is_alone = (
        gradient.is_contiguous()
        and storage.nbytes() == gradient.numel() * gradient.element_size()
        and storage._cdata not in storages
    )
    storages.add(storage._cdata)
    return gradient if is_alone else gradient.clone(memory_format=torch.contiguous_format)


class SummedProducts(TorchFunctionMode):
    """While active, linear layers add their weights' gradients to *sums* in their backward.

    The last one does nothing else, if *ending* says that its product need not be there: see [Note:
    Last products] in ``endings``. Autocast casts the operands of a linear layer first; under it
    they are left alone. See [Note: Products into sums].
    """

    def __init__(self, sums: WeightSums, ending: Ending) -> None:
        super().__init__()
        self._sums = sums
        self._ending = ending
        self._num_linears = 0
        self._left_out: Any = None
        """The node of the last product, where that was left out."""

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
        if self._left_out is not None and needs_values(func, args, kwargs):
            raise NeedsValuesError
        if is_linear(func):
            self._num_linears += 1
            is_last = self._num_linears == self._ending.last and torch.is_grad_enabled()
            found = _operands(func, args, kwargs or {})
            if found is not None:
                inputs, weight, bias = found
                sums = (self._sums.of(weight), self._sums.of(bias))
                if (is_last or sums != (None, None)) and _is_plain(inputs, weight, bias):
                    lead = inputs.shape[:-1]
                    rows = inputs if len(lead) == 1 else inputs.reshape(-1, inputs.shape[-1])
                    is_addmm = func is torch.addmm
                    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                        rows, weight, bias, is_addmm, *sums, is_last
                    )
                    self._left_out = output.grad_fn if is_last else None
                    # Viewed here: what a function of ours returns as a view none may write to.
                    return output if len(lead) == 1 else output.view(*lead, output.shape[-1])
        return func(*args, **(kwargs or {}))

    def check(self, output: Tensor) -> None:
        """Look that nothing asked for a product that was left out, once *output* is there.

        Raises:
            NeedsValuesError: something may have.
        """
        if self._left_out is not None:
            check_way(output, self._left_out)


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
        sum_of_weight: _Sum | None,
        sum_of_bias: _Sum | None,
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
            sum_of_bias.add_rows(grad)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = torch.mm(grad, weight.t() if is_transposed else weight)
        return of_inputs, None, None, None, None, None, None
