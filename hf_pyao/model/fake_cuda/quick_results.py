"""Results of common operations on fake tensors, without the detour through Python.

For an operation on fake tensors torch looks into a cache of results, and works out in Python what
is not there, which takes up to some milliseconds. Half of all operations of a step are views, and
each micro-batch has sizes of its own. So those whose kernels for the meta device are fast are
answered by these. Whatever is not plain goes the usual way, and says the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_VIEWS = (
    "alias.default detach.default expand.default permute.default select.int slice.Tensor "
    "squeeze.dim t.default transpose.int unsqueeze.default view.default view.dtype "
    "_unsafe_view.default"
)
_WRITTEN = "add_.Tensor copy_.default fill_.Scalar sub_.Tensor zero_.default"
_NEW = (
    "_scaled_dot_product_flash_attention.default _to_copy.default bmm.default clone.default "
    "constant_pad_nd.default embedding.default embedding_dense_backward.default"
)
_ANSWERED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (each.split(".") for each in f"{_VIEWS} {_WRITTEN} {_NEW}".split())
)
"""Operations whose kernels for the meta device are fast, and return what they return everywhere."""


def quick_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what *func* returns of fake tensors; None if it is to be run as ever.

    Args:
        func: an operation of aten.
        args: of the operation.
        kwargs: of the operation.
    """
    if func not in _ANSWERED:
        return None
    first: Any = args[0]
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor) and not (
            type(each) is FakeTensor
            and each.constant is None
            and each.fake_mode is first.fake_mode
            and each.fake_device == first.fake_device
        ):
            return None
    mode, device = first.fake_mode, first.fake_device
    if mode.in_kernel_invocation or mode.shape_env is not None:
        return None
    if kwargs.get("device") not in (None, device):
        return None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": None}
    with in_kernel_invocation_manager(mode):
        found = func(*args, **kwargs)
    if isinstance(found, tuple):
        return tuple(_faked(each, first) for each in found)
    return _faked(found, first)


def _faked(found: Any, like: FakeTensor) -> Any:
    """Return *found* as a fake tensor, if it is a tensor and no fake one that was written."""
    if type(found) is FakeTensor or not isinstance(found, torch.Tensor):
        return found
    return FakeTensor(like.fake_mode, found, like.fake_device)
