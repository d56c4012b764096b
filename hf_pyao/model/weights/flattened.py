"""Weights of tensor classes that are made of plain tensors, as torchao's are.

Such a class says by ``__tensor_flatten__`` which plain tensors it has (packed data, scales, zero
points), and makes an object anew from others of the same kind (``__tensor_unflatten__``). This is
torch's protocol of traceable wrapper subclasses (``torch.utils._python_dispatch``). The plain
tensors are streamed. Inside of a layer, the module's attribute gives an object of the same class
over their views on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_pyao.engine.transfer.layout import has_storage


class FlattenedWeight:
    """A parameter that is made of plain tensors.

    Args:
        parameter: held weakly; of a traceable wrapper subclass.
    """

    def __init__(self, parameter: Any) -> None:
        self.ref = weakref.ref(parameter)
        names, self._context = parameter.__tensor_flatten__()
        self.tensors: tuple[tuple[str, torch.Tensor], ...] = tuple(
            (name, getattr(parameter, name)) for name in names
        )
        """Attribute and tensor of each part."""

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained by now."""
        parameter = self.ref()
        return parameter is not None and bool(parameter.requires_grad)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an object like the parameter over *tensors*, in the order of :attr:`tensors`."""
        parameter: Any = self.ref()
        inner = {name: each for (name, _), each in zip(self.tensors, tensors, strict=True)}
        made: torch.Tensor = type(parameter).__tensor_unflatten__(
            inner, self._context, parameter.size(), parameter.stride()
        )
        return made


def flattened(parameter: Parameter) -> FlattenedWeight | None:
    """Return what streams *parameter* by its parts; None if it has none that can be streamed.

    It must be on the host: the object's own device cannot be changed later.
    """
    anything: Any = parameter
    if not is_traceable_wrapper_subclass(anything) or parameter.device.type != "cpu":
        return None
    weight = FlattenedWeight(parameter)
    parts = [tensor for _, tensor in weight.tensors]
    keys = {tensor.untyped_storage()._cdata for tensor in parts if type(tensor) is torch.Tensor}
    is_streamable = len(keys) == len(parts) and all(
        has_storage(tensor) and tensor.numel() and not tensor.requires_grad for tensor in parts
    )
    return weight if parts and is_streamable else None
