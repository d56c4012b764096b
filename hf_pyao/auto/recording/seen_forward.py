"""``SeenForward``: what a model's forward was called with, without what its tensors hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


@dataclass(frozen=True)
class TensorShape:
    """A tensor without what it holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a tensor of it; integers are zeros, which are indices of something."""
        make = torch.empty if self.dtype.is_floating_point else torch.zeros
        return make(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class SeenForward:
    """What a model's forward was called with."""

    args: tuple[Any, ...]
    """Tensors are :class:`TensorShape`."""
    kwargs: dict[str, Any]
    autocast_dtype: torch.dtype | None
    """What autocast computes in; None if it is off."""
    has_padding: bool
    """True if an attention mask hides something."""

    def shapes(self) -> list[str]:
        """Name the arguments that are tensors: ``"input_ids int64[2, 512]"``."""
        found = []
        for name, value in (*enumerate(self.args), *self.kwargs.items()):
            for leaf in tree_leaves(value):
                if isinstance(leaf, TensorShape):
                    dtype = str(leaf.dtype).removeprefix("torch.")
                    found.append(f"{name} {dtype}{list(leaf.shape)}")
        if self.autocast_dtype is not None:
            found.append(f"autocast {str(self.autocast_dtype).removeprefix('torch.')}")
        return found

    def sizes(self) -> list[list[int]]:
        """Return the shapes of the tensors among the arguments, in order."""
        return [list(each.shape) for each in self._tensors()]

    def resized(self, sizes: Sequence[Sequence[int]]) -> SeenForward | None:
        """Return the same call with tensors of other sizes, as :meth:`sizes` gives them.

        None if the other call has other tensors.
        """
        own = self._tensors()
        if [len(size) for size in sizes] != [len(each.shape) for each in own]:
            return None
        left = iter(sizes)

        def other(value: Any) -> Any:
            if not isinstance(value, TensorShape):
                return value
            return dataclasses.replace(value, shape=tuple(next(left)))

        args, kwargs = tree_map(other, (self.args, self.kwargs))
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def _tensors(self) -> list[TensorShape]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, TensorShape)]


def seen_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenForward:
    """Return what a forward with these arguments is called with, autocast as it is here."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors} or {"cpu"}
    device = next((each for each in devices if each != "cpu"), "cpu")
    is_autocast = torch.is_autocast_enabled(device)
    mask = kwargs.get("attention_mask")
    has_padding = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
    return SeenForward(
        tree_map(_shape_of, args),
        tree_map(_shape_of, dict(kwargs)),
        torch.get_autocast_dtype(device) if is_autocast else None,
        has_padding,
    )


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.dtype, value.device)
    return value


def with_tensors(values: Any) -> Any:
    """Return *values*, nested in any way, with empty tensors in place of their shapes."""
    return tree_map(
        lambda value: value.empty() if isinstance(value, TensorShape) else value, values
    )
