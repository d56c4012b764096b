"""Results of common operations on fake tensors, without the detour through Python.

For an operation on fake tensors torch looks into a cache of results, and works out in Python what
is not there, which takes up to some milliseconds. Half of all operations of a step are views, and
each micro-batch has sizes of its own. So those that a step is made of are answered here: by torch's
kernels for the meta device where these are C++, and by an empty tensor where the result's shape and
dtype are plain. Whatever is not plain goes the usual way, and says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_ATEN: Any = torch.ops.aten

_WITH_META_KERNELS = frozenset(
    {
        # Views.
        _ATEN.detach.default,
        _ATEN.expand.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.squeeze.dim,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
        _ATEN.view.dtype,
        _ATEN._unsafe_view.default,
        # Written in place.
        _ATEN.add_.Tensor,
        _ATEN.copy_.default,
        _ATEN.set_.source_Storage_storage_offset,
        # New tensors.
        _ATEN._to_copy.default,
        _ATEN.bmm.default,
        _ATEN.clone.default,
        _ATEN.embedding.default,
        _ATEN.mm.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
        _ATEN.nll_loss_backward.default,
        _ATEN.nll_loss_forward.default,
        _ATEN.sum.dim_IntList,
    }
)
"""Operations whose kernels for the meta device are C++, and return what they return everywhere."""

_ELEMENTWISE = frozenset(
    {
        _ATEN.add.Tensor,
        _ATEN.div.Scalar,
        _ATEN.div.Tensor,
        _ATEN.gelu.default,
        _ATEN.gelu_backward.default,
        _ATEN.mul.Scalar,
        _ATEN.mul.Tensor,
        _ATEN.neg.default,
        _ATEN.pow.Tensor_Scalar,
        _ATEN.relu.default,
        _ATEN.rsqrt.default,
        _ATEN.silu.default,
        _ATEN.silu_backward.default,
        _ATEN.sub.Tensor,
        _ATEN.threshold_backward.default,
    }
)
"""Operations that compute element by element, in the dtype of their tensors if these have one."""


def quick_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what *func* returns of fake tensors; None if it is to be run as ever.

    Args:
        func: an operation of aten.
        args: of the operation.
        kwargs: of the operation.
    """
    if func is _ATEN.empty.memory_format:
        return _empty(args, kwargs)
    work_out = _DIRECT.get(func)
    if work_out is None and func not in _WITH_META_KERNELS:
        return None
    if kwargs.get("device") is not None:
        return None
    first: FakeTensor | None = None
    for each in (*args, *kwargs.values()):
        if not isinstance(each, torch.Tensor):
            continue
        if type(each) is not FakeTensor or each.constant is not None:
            return None
        if first is None:
            first = each
        elif first.fake_mode is not each.fake_mode or first.fake_device != each.fake_device:
            return None
    if first is None or not _is_plain(first.fake_mode):
        return None
    mode, device = first.fake_mode, first.fake_device
    with in_kernel_invocation_manager(mode):
        found = func(*args, **kwargs) if work_out is None else work_out(*args, **kwargs)
    if found is None or type(found) is FakeTensor:  # what it has written
        return found
    if isinstance(found, torch.Tensor):
        return FakeTensor(mode, found, device)
    return tuple(None if each is None else FakeTensor(mode, each, device) for each in found)


def _is_plain(mode: FakeTensorMode) -> bool:
    return not mode.in_kernel_invocation and mode.shape_env is None


def _empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = active_fake_mode()
    device = torch.device(kwargs.get("device") or "cpu")
    is_strided = kwargs.get("layout") in (None, torch.strided)
    if mode is None or not _is_plain(mode) or device.type == "meta" or not is_strided:
        return None
    with in_kernel_invocation_manager(mode):
        found = _ATEN.empty.memory_format(*args, **{**kwargs, "device": "meta", "pin_memory": None})
    return FakeTensor(mode, found, device)


# ---- results of plain shape and dtype, as tensors of the meta device ------------------------


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous tensor of the meta device, of the shape of *tensor*."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def _elementwise(first: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor | None:
    shape = first.shape
    if not first.dtype.is_floating_point or not first.is_contiguous() or not shape:
        return None
    for other in others:
        if isinstance(other, torch.Tensor):
            if other.dtype != first.dtype or not other.is_contiguous() or not other.shape:
                return None
            if other.shape != shape:
                shape = torch.broadcast_shapes(shape, other.shape)  # type: ignore[no-untyped-call]
        elif isinstance(other, complex):
            return None
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    if not input.dtype.is_floating_point or not input.is_contiguous():
        return None
    return _like(input), _like(input, torch.bool)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    return _elementwise(grad) if mask.is_contiguous() and grad.shape == mask.shape else None


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any
) -> torch.Tensor | None:
    if not left.dtype == right.dtype == bias.dtype or left.shape[1] != right.shape[0]:
        return None
    return torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device="meta")


def _addmm_out(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any, **kwargs: Any
) -> torch.Tensor | None:
    out: torch.Tensor = kwargs["out"]
    fits = left.shape[1] == right.shape[0] and out.shape == (left.shape[0], right.shape[1])
    return out if fits else None


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


_DIRECT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    _ATEN.addmm.default: _addmm,
    # As CUDA has them (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``).
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN.native_dropout.default: _dropout,
    _ATEN.native_dropout_backward.default: _dropout_backward,
}
if hasattr(_ATEN.addmm, "dtype_out"):  # since torch 2.10
    _DIRECT[_ATEN.addmm.dtype_out] = _addmm_out
