"""``HostWeight``: what a module's attribute gives for a weight that zeroth order reads by rows.

[Note: Weights without memory]
It has shape, dtype and device of the weight as compute would find it, and no memory. Each function
of it is its reader's to compute (``../zeroth_order/by_rows.py``): whatever code reads the weight
finds it on the compute device in this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from hf_pyao.engine.weights.blocks import Weight

_ATTRIBUTES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized "
    "is_sparse is_sparse_csr is_xpu itemsize layout nbytes ndim output_nr requires_grad shape "
    "_backward_hooks"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_conj is_contiguous is_floating_point "
    "is_inference is_neg is_signed numel size stride storage_offset"
)
_METADATA = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    )
)
"""Functions that need no element."""


class Reader(Protocol):
    """Computes with weights that are on the host."""

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what *function* returns of the weights that :class:`HostWeight` stands for."""
        ...


class HostWeight(torch.Tensor):
    """Stands for a weight on the host; see [Note: Weights without memory]."""

    weight: Weight
    _reader: Reader

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter that it stands for; None once it is gone."""
        return self.weight.ref()

    @staticmethod
    def of(weight: Weight, device: torch.device, reader: Reader) -> HostWeight:
        """Return what stands for *weight*.

        Args:
            weight: on the host.
            device: where it is to be read.
            reader: computes with it.
        """
        made: HostWeight = torch.Tensor._make_wrapper_subclass(
            HostWeight,
            weight.size,
            strides=weight.master.stride,
            dtype=weight.dtype,
            device=device,
            requires_grad=False,
        )
        made.weight = weight
        made._reader = reader
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer by the weight's metadata, or compute with its bytes."""
        kwargs = kwargs or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        return _reader_among(args, kwargs).compute(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute with the weight's bytes, below autograd."""
        kwargs = kwargs or {}
        return _reader_among(args, kwargs).compute(function, args, kwargs)


def _reader_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reader:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return next(each._reader for each in leaves if isinstance(each, HostWeight))
