"""Saved tensors of classes that are made of plain tensors: float8 with scales, ``DTensor``.

Such a class says by ``__tensor_flatten__`` which tensors it has, and makes an object anew from
others of the same kind (``__tensor_unflatten__``). This is torch's protocol of traceable wrapper
subclasses (``torch.utils._python_dispatch``). The inner tensors are packed one by one, without any
loss. In backward an object of the same class is made over them.

Three kinds are kept as they are: nested tensors, whose ragged size is known by the identity of
their offsets; results of collectives that may not have ended (``AsyncCollectiveTensor``), since
reading their bytes does not wait for them; and tensors that were changed in place before, since the
versions of inner tensors do not tell their contents apart.

Their handle is :class:`~hf_pyao.engine.runtime.saved_tensor.FlattenedTensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Watch: TypeAlias = tuple[torch.Tensor, int]
"""A tensor that has the version counter of another one, and the version which that had."""


def emptied(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> Watch:
    """Watch *tensor*, of a subclass, which has *inner* tensors by attribute; keep none of these.

    A detached tensor shares its origin's version counter; its inner tensors are exchanged for empty
    ones. The counters of inner tensors would not do: a subclass changes them below autograd.

    Raises:
        AttributeError: its class does not let them be exchanged.
        TypeError: the same, or its ``detach`` makes no other tensor.
    """
    counter = tensor.detach()
    if counter is tensor:
        raise TypeError("a detached tensor is another object")
    for name, each in inner.items():
        setattr(counter, name, each.new_empty(0))
    return counter, tensor._version


class Flattening:
    """How to make a tensor of a subclass anew; holds none of its inner tensors.

    Args:
        tensor: of a traceable wrapper subclass.
        others: what ``__tensor_flatten__`` names and is no tensor (a ``DTensor``'s mesh), by name.
        context: what the class needs beside its inner tensors.
        watch: sees in-place changes of the first.
    """

    def __init__(
        self, tensor: torch.Tensor, others: Mapping[str, Any], context: Any, watch: Watch
    ) -> None:
        self.watch = watch
        self._kind: Any = type(tensor)
        self._others = dict(others)
        self._context = context
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor_over(self, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor like the first, over *inner* tensors by attribute; it needs no grad."""
        made: torch.Tensor = self._kind.__tensor_unflatten__(
            {**inner, **self._others}, self._context, self._size, self._stride
        )
        return made.detach() if made.requires_grad else made


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what *tensor* is made of, waited for; nothing if it is a plain tensor."""
    anything: Any = tensor
    if not is_traceable_wrapper_subclass(anything):
        return []
    if hasattr(anything, "trigger_wait"):  # AsyncCollectiveTensor
        return [anything.trigger_wait()]
    names, _ = anything.__tensor_flatten__()
    values = [getattr(anything, name) for name in names]
    return [each for each in values if isinstance(each, torch.Tensor)]


def flatten(tensor: torch.Tensor) -> tuple[Flattening, dict[str, torch.Tensor]] | None:
    """Take *tensor* apart; None if it has to be kept as it is.

    Returns:
        How to make it anew, and its inner tensors by attribute.
    """
    anything: Any = tensor
    if not is_traceable_wrapper_subclass(anything) or tensor.is_nested or tensor._version:
        return None
    if hasattr(tensor, "trigger_wait"):  # AsyncCollectiveTensor
        return None
    plain: Any = tensor.detach()
    names, context = plain.__tensor_flatten__()
    values = {name: getattr(plain, name) for name in names}
    inner = {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}
    if not inner or any(each.requires_grad for each in inner.values()):
        return None
    others = {name: each for name, each in values.items() if name not in inner}
    try:
        watch = emptied(tensor, inner)
    except (AttributeError, TypeError):  # properties, slots, frozen dataclasses
        return None
    return Flattening(plain, others, context, watch), inner
