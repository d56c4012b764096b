"""Results of plain shape and dtype, as tensors of the meta device; None for what is not plain.

These operations have kernels for the meta device in Python, which take from 15 to 500 microseconds.
Each function takes the arguments of its operations: fake tensors, with dispatch to Python off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ATEN: Any = torch.ops.aten

# ---- element by element ------------------------------------------------------------------------


def _broadcast(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Return the shape of both together; raise what torch raises if they do not fit."""
    if len(first) < len(second):
        first, second = second, first
    lead = len(first) - len(second)
    pairs = [*zip(first[lead:], second, strict=True)]
    if not all(one == other or 1 in (one, other) for one, other in pairs):
        torch.broadcast_shapes(first, second)  # type: ignore[no-untyped-call]
    return (*first[:lead], *(other if one == 1 else one for one, other in pairs))


def _combined(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Return what *tensors* give element by element.

    It is contiguous if they are. Else its dimensions are ordered as the first tensor's are, if that
    has strides that leave no choice (``aten/src/ATen/TensorIterator.cpp``, ``reorder_dimensions``).
    """
    first = tensors[0]
    shape: Sequence[int] = first.shape
    for each in tensors[1:]:
        if each.shape != shape:
            shape = _broadcast(shape, each.shape)
    if all(each.is_contiguous() for each in tensors):
        return torch.empty(shape, dtype=dtype, device="meta")
    if first.shape != shape:
        return None
    strides = first.stride()
    if len(tensors) == 1 and 0 in strides:  # an expanded dimension stays where it is
        steps = [stride for stride in strides if stride]
        in_order = all(one > other for one, other in itertools.pairwise(steps))
        return torch.empty(shape, dtype=dtype, device="meta") if in_order else None
    if 0 in strides or len({*strides}) < len(strides):
        return None
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    return torch.empty_permuted(shape, order, dtype=dtype, device="meta")


def _elementwise(first: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor | None:
    dtype = first.dtype
    if not dtype.is_floating_point:
        return None
    tensors = [first]
    for other in others:
        if isinstance(other, torch.Tensor):
            if other.dtype != dtype:
                return None
            tensors.append(other)
        elif isinstance(other, complex):
            return None
    return _combined(tensors, dtype)


def _arithmetic(first: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor | None:
    """Return a sum, difference or product, which has integers of integers."""
    if first.dtype != torch.int64:
        return _elementwise(first, *others, **options)
    others = (*others, *options.values())
    tensors = [first, *(each for each in others if isinstance(each, torch.Tensor))]
    numbers = [each for each in others if not isinstance(each, torch.Tensor)]
    if any(each.dtype != first.dtype for each in tensors) or not all(
        isinstance(each, int) for each in numbers
    ):
        return None
    return _combined(tensors, first.dtype)


def _either(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    is_plain = first.dtype == second.dtype == torch.bool
    return _combined((first, second), torch.bool) if is_plain else None


def _compared(first: torch.Tensor, other: float) -> torch.Tensor | None:
    is_plain = not first.dtype.is_complex and isinstance(other, int | float)
    return _combined((first,), torch.bool) if is_plain else None


def _where(
    condition: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor | None:
    is_plain = condition.dtype == torch.bool and first.dtype == second.dtype
    return _combined((condition, first, second), first.dtype) if is_plain else None


def _threshold_backward(
    grad: torch.Tensor, input: torch.Tensor, threshold: float
) -> torch.Tensor | None:
    """Return a gradient of the input's layout (``aten/src/ATen/native/Activation.cpp``)."""
    return _elementwise(input, grad, threshold)


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    if not input.dtype.is_floating_point or not input.is_contiguous():
        return None
    return _like(input), _like(input, torch.bool)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    is_plain = grad.is_contiguous() and mask.is_contiguous() and grad.shape == mask.shape
    return _elementwise(grad) if is_plain else None


# ---- sums and products -------------------------------------------------------------------------


def _reduced(
    input: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    num_dims = input.dim()
    if not input.dtype.is_floating_point or dtype not in (None, input.dtype):
        return None
    if not all(-num_dims <= dim < num_dims for dim in dims or ()):
        return None
    reduced = {dim % num_dims for dim in dims or range(num_dims)}
    if len(reduced) < len(dims or ()):
        return None
    shape = [
        1 if dim in reduced else size
        for dim, size in enumerate(input.shape)
        if keepdim or dim not in reduced
    ]
    return torch.empty(shape, dtype=input.dtype, device="meta")


def _any(input: torch.Tensor) -> torch.Tensor | None:
    return torch.empty((), dtype=torch.bool, device="meta") if input.dtype == torch.bool else None


def _fits(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[int, ...] | None:
    """Return the shape of a product of matrices; None if they, or *out*, do not fit."""
    shape = (left.shape[0], right.shape[1])
    fits = left.shape[1] == right.shape[0] and (out is None or out.shape == shape)
    return shape if fits else None


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any
) -> torch.Tensor | None:
    shape = _fits(left, right)
    if not left.dtype == right.dtype == bias.dtype or shape is None:
        return None
    return torch.empty(shape, dtype=left.dtype, device="meta")


def _addmm_out(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> torch.Tensor | None:
    return None if _fits(left, right, out) is None else out


def _mm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor | None:
    is_plain = left.dtype == right.dtype == out.dtype and left.dim() == right.dim() == 2
    return out if is_plain and _fits(left, right, out) is not None else None


def _mm(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    is_plain = left.dtype == right.dtype and left.dim() == right.dim() == 2
    shape = _fits(left, right) if is_plain else None
    if shape is None or dtype not in (None, left.dtype, torch.float32):
        return None
    return torch.empty(shape, dtype=dtype or left.dtype, device="meta")


# ---- layers ------------------------------------------------------------------------------------


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous tensor of the shape of *tensor*."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def _new(
    tensor: torch.Tensor,
    size: Sequence[int],
    *,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor | None:
    dtype = dtype or tensor.dtype
    if layout not in (None, torch.strided) or pin_memory:
        return None
    if stride is None:
        return torch.empty(size, dtype=dtype, device="meta")
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _new_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], **options: Any
) -> torch.Tensor | None:
    return _new(tensor, size, stride=stride, **options)


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, ...] | None:
    grads = [_combined((each,), each.dtype) for each in (query, key, value)]
    made = tuple(each for each in grads if each is not None)
    return made if len(made) == len(grads) else None


def _layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    num_rows_dims = input.dim() - len(normalized_shape)
    shape = (*input.shape[:num_rows_dims], *(1 for _ in normalized_shape))
    wide = torch.promote_types(input.dtype, torch.float32)
    statistics = (torch.empty(shape, dtype=wide, device="meta") for _ in range(2))
    return (_like(input), *statistics)


def _layer_norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        _like(each) if is_asked and each is not None else None
        for each, is_asked in zip((input, weight, bias), output_mask, strict=True)
    )


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Return a concatenation, which is contiguous if no tensor has its channels last."""
    first = tensors[0]
    num_dims = first.dim()
    if not -num_dims <= dim < num_dims:
        return None
    if num_dims > 3 and not first.stride(1) > first.stride(-1):
        return None
    dim %= num_dims
    shape = [*first.shape]
    shape[dim] = sum(each.shape[dim] for each in tensors if each.dim() == num_dims)
    for each in tensors:
        others = [*each.shape]
        others[dim : dim + 1] = shape[dim : dim + 1]
        if each.dtype != first.dtype or others != shape:
            return None
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _log_softmax(input: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor | None:
    is_plain = input.dtype.is_floating_point and input.is_contiguous() and not half_to_float
    return _like(input) if is_plain and -input.dim() <= dim < input.dim() else None


def _log_softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor | None:
    is_plain = grad.is_contiguous() and output.is_contiguous() and grad.shape == output.shape
    return _log_softmax(grad, dim) if is_plain and grad.dtype == output.dtype == dtype else None


def _into(work_out: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """Return the form of *work_out* that writes its result."""

    def written(*args: Any, out: torch.Tensor) -> torch.Tensor | None:
        found = work_out(*args)
        fits = found is not None and (found.shape, found.dtype) == (out.shape, out.dtype)
        return out if fits else None

    return written


def _nll_loss(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, _: int
) -> tuple[torch.Tensor, ...] | None:
    fits = input.dim() == 2 and target.shape == input.shape[:1]
    if not fits or weight is not None or not input.dtype.is_floating_point:
        return None
    shapes = ((), ()) if reduction else (target.shape, ())
    return tuple(torch.empty(shape, dtype=input.dtype, device="meta") for shape in shapes)


def _nll_loss_backward(
    grad: torch.Tensor, input: torch.Tensor, target: torch.Tensor, weight: Any, *_: Any
) -> torch.Tensor | None:
    fits = input.dim() == 2 and target.shape == input.shape[:1] and grad.dtype == input.dtype
    is_plain = weight is None and input.dtype.is_floating_point and input.is_contiguous()
    return _like(input) if fits and is_plain else None


def _slice_backward(grad: torch.Tensor, sizes: Sequence[int], *_: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=grad.dtype, device="meta")


_FLOATING = frozenset(
    {
        _ATEN.div.Scalar,
        _ATEN.div.Tensor,
        _ATEN.gelu.default,
        _ATEN.gelu_backward.default,
        _ATEN.mul.Scalar,
        _ATEN.neg.default,
        _ATEN.pow.Tensor_Scalar,
        _ATEN.relu.default,
        _ATEN.rsqrt.default,
        _ATEN.silu.default,
        _ATEN.silu_backward.default,
    }
)
"""Operations that compute element by element, in the dtype of their tensors if these have one."""

_COMPARISONS = (_ATEN.eq, _ATEN.ge, _ATEN.gt, _ATEN.le, _ATEN.lt, _ATEN.ne)

PLAIN_RESULTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_FLOATING, _elementwise),
    **dict.fromkeys((_ATEN.add.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor), _arithmetic),
    **{comparison.Scalar: _compared for comparison in _COMPARISONS},
    **dict.fromkeys((_ATEN.bitwise_and.Tensor, _ATEN.bitwise_or.Tensor), _either),
    **dict.fromkeys((_ATEN.mean.dim, _ATEN.sum.default, _ATEN.sum.dim_IntList), _reduced),
    **dict.fromkeys(
        (_ATEN.new_empty.default, _ATEN.new_ones.default, _ATEN.new_zeros.default), _new
    ),
    _ATEN.new_empty_strided.default: _new_strided,
    _ATEN._scaled_dot_product_flash_attention_backward.default: _attention_backward,
    _ATEN._log_softmax.default: _log_softmax,
    _ATEN._log_softmax.out: _into(_log_softmax),
    _ATEN._log_softmax_backward_data.default: _log_softmax_backward,
    _ATEN._log_softmax_backward_data.out: _into(_log_softmax_backward),
    _ATEN.addmm.default: _addmm,
    _ATEN.any.default: _any,
    _ATEN.cat.default: _joined,
    _ATEN.log_softmax.int_out: _into(_log_softmax),
    _ATEN.mm.default: _mm,
    _ATEN.mm.out: _mm_out,
    # As CUDA has them (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``).
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN.native_dropout.default: _dropout,
    _ATEN.native_dropout_backward.default: _dropout_backward,
    _ATEN.nll_loss_backward.default: _nll_loss_backward,
    _ATEN.nll_loss_forward.default: _nll_loss,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN.threshold_backward.default: _threshold_backward,
    _ATEN.where.self: _where,
}
"""By operation, what works out its result."""
if hasattr(_ATEN.addmm, "dtype_out"):  # since torch 2.10
    PLAIN_RESULTS[_ATEN.addmm.dtype_out] = _addmm_out
if hasattr(_ATEN.mm, "dtype"):
    PLAIN_RESULTS[_ATEN.mm.dtype] = _mm
