"""Results of common operations on fake tensors, without the detour through Python.

For an operation on fake tensors torch looks into a cache of results, and works out in Python what
is not there, which takes up to some milliseconds. Half of all operations of a step are views, and
each micro-batch has sizes of its own. So those whose kernels for the meta device are fast are
answered by these. Whatever is not plain goes the usual way, and says the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_ATEN: Any = torch.ops.aten
_FAKE = torch._C._TorchDispatchModeKey.FAKE

_WITH_META_KERNELS = frozenset(
    {
        # Views.
        _ATEN.alias.default,
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
        _ATEN.fill_.Scalar,
        _ATEN.index_put_.default,
        _ATEN.set_.source_Storage_storage_offset,
        _ATEN.sub_.Tensor,
        _ATEN.zero_.default,
        # New tensors.
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._to_copy.default,
        _ATEN.bmm.default,
        _ATEN.clone.default,
        _ATEN.constant_pad_nd.default,
        _ATEN.embedding.default,
        _ATEN.embedding_dense_backward.default,
        _ATEN.index.Tensor,
    }
)
"""Operations whose kernels for the meta device are fast, and return what they return everywhere."""

_FACTORIES = frozenset(
    {
        _ATEN.arange.default,
        _ATEN.empty.memory_format,
        _ATEN.full.default,
        _ATEN.ones.default,
        _ATEN.scalar_tensor.default,
        _ATEN.zeros.default,
    }
)
"""Operations that make a tensor of none, and whose kernels for the meta device are fast."""

_FILLED = frozenset({_ATEN.ones.default, _ATEN.zeros.default})
"""Those of them that make what ``empty`` makes, but for its values."""

_TAKES_LISTS = frozenset({_ATEN.cat.default, _ATEN.index.Tensor, _ATEN.index_put_.default})
"""Operations with tensors in lists."""

_ANSWERED = _WITH_META_KERNELS | _FACTORIES


def quick_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what *func* returns of fake tensors; None if it is to be run as ever.

    Args:
        func: an operation of aten.
        args: of the operation.
        kwargs: of the operation.
    """
    if func not in _ANSWERED:
        return None
    if func in _FACTORIES:
        return _made(func, args, kwargs)
    mode = device = None
    for each in _tensors_among(func, args, kwargs):
        if type(each) is not FakeTensor or each.constant is not None:
            return None
        if mode is None:
            mode, device = each.fake_mode, each.fake_device
        elif mode is not each.fake_mode or device != each.fake_device:
            return None
    if mode is None or device is None or not _is_plain(mode):
        return None
    asked = kwargs.get("device") if kwargs else None
    if asked is not None:
        if asked != device:
            return None
        kwargs = {**kwargs, "device": None}
    with in_kernel_invocation_manager(mode):
        found = func(*args, **kwargs)
    if isinstance(found, tuple):
        return tuple(_faked(each, mode, device) for each in found)
    return _faked(found, mode, device)


def _tensors_among(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operation, those in lists too."""
    given = (*args, *kwargs.values()) if kwargs else args
    found = [each for each in given if isinstance(each, torch.Tensor)]
    if func in _TAKES_LISTS:
        lists = (each for each in args if isinstance(each, list | tuple))
        found += [item for each in lists for item in each if isinstance(item, torch.Tensor)]
    return found


def _is_plain(mode: FakeTensorMode) -> bool:
    return not mode.in_kernel_invocation and mode.shape_env is None


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a factory makes in the mode that is active."""
    mode: Any = torch._C._get_dispatch_mode(_FAKE)
    device = torch.device(kwargs.get("device") or "cpu")
    is_strided = kwargs.get("layout") in (None, torch.strided)
    if mode is None or not _is_plain(mode) or device.type == "meta" or not is_strided:
        return None
    if func in _FILLED:
        func = _ATEN.empty.memory_format
    with in_kernel_invocation_manager(mode):
        found = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
    return new_fake(found, mode, device)


def _faked(found: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """Return *found* as a fake tensor, if it is a tensor and no fake one that was written."""
    if type(found) is FakeTensor or not isinstance(found, torch.Tensor):
        return found
    return new_fake(found, mode, device)


def new_fake(meta: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Return ``FakeTensor(mode, meta, device)``, for a tensor of the meta device.

    torch sets twenty attributes one by one, half of them through descriptors. All but the mode are
    the same for every new tensor of a device, and copied here.
    """
    if device.type != "cpu" and device == torch.device(device.type):
        return FakeTensor(mode, meta, device)  # of the device that is the current one now
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor,
        meta,
        meta.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=device,
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(_attributes_of(device), fake_mode=mode)
    return made


@functools.cache
def _attributes_of(device: torch.device) -> dict[str, Any]:
    """Return the attributes of a new fake tensor of *device*, without its mode."""
    mode = FakeTensorMode()
    with in_kernel_invocation_manager(mode):
        meta = torch.empty((), device="meta")
    attributes = dict(FakeTensor(mode, meta, device).__dict__)
    del attributes["fake_mode"]
    return attributes
