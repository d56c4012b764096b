"""Whether tensors have changed, for logits that are computed later than in the model's own code.

[Note: Unchanged] An in-place change bumps a tensor's version, but not every one does: fused
optimizers, ``p.data.add_`` and custom kernels write past it, and ``p.data = q`` exchanges the
memory. So a sample of the elements is kept beside the version: one of each row of a matrix at
least, each time in another column. A write to whole rows or columns of a weight is seen; a write
past the version to a few single elements may be missed. Taking the sample is one small kernel and
waits for nothing. Comparing it waits for the device, and happens only if the logits are read after
the loss was taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_MAX_ELEMENTS = 2**18
"""Elements that are sampled of a tensor that is no matrix."""

_READABLE = (Tensor, nn.Parameter, FakeTensor)
"""Fake tensors are sampled so that a recorded step has the samples' memory and time."""


class Unchanged:
    """Remembers what tensors held; see [Note: Unchanged].

    Args:
        tensors: known by their versions from now on, and kept alive.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._samples: list[Tensor | None] | None = None

    def sample(self, tensors: Iterable[Tensor]) -> None:
        """Remember some elements of *tensors*, as they are now. Waits for nothing."""
        self._samples = [_sample(tensor) for tensor in tensors]

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether versions and elements are as they were.

        Args:
            tensors: as they were given to :meth:`sample`, the same ones or others in their place.
                If there are samples, this waits for the device.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            return False
        if self._samples is None:
            return True
        now = [_sample(tensor) for tensor in tensors]
        return len(now) == len(self._samples) and all(
            _same_bits(*pair) for pair in zip(self._samples, now, strict=True)
        )


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor | None:
    """Return a few elements, in memory of their own; None of tensors that cannot be read so."""
    if type(tensor) not in _READABLE or tensor.device.type == "meta":
        return None
    plain = tensor.detach()
    if not plain.is_contiguous():
        return plain.select(-1, 0).clone() if plain.dim() > 1 else plain.clone()
    if plain.dim() > 1 and plain.shape[-1] > 2:
        step = plain.shape[-1] - 1  # less than a row: the column moves on from row to row
    else:
        step = max(1, plain.numel() // _MAX_ELEMENTS)
    return plain.view(-1)[::step].clone()


def _same_bits(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None:
        return before is now
    same_kind = before.shape == now.shape and before.dtype == now.dtype
    if not same_kind or before.device != now.device:
        return False
    if isinstance(before, FakeTensor) or isinstance(now, FakeTensor):
        return type(before) is type(now)  # no elements to compare
    bits = (sample.reshape(-1).view(torch.uint8) for sample in (before, now))
    return torch.equal(*bits)
