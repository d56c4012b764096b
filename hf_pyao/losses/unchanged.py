"""Whether tensors still hold what they held: for logits that are computed later than they were due.

[Note: Unchanged] An in-place change bumps a tensor's version, but not every one does: fused
optimizers, ``p.data.add_`` and custom kernels write past it, and ``p.data = q`` exchanges the
memory. So a sample of the elements is kept beside the version: one of each row of a matrix at
least, each time in another column. What is written to whole rows or columns of a weight is seen;
what is written past the version to a few single elements may not be. Taking the sample is one small
kernel and waits for nothing. Comparing it waits for the device, and happens only when somebody
reads the logits after the loss was taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_MAX_ELEMENTS = 2**18
"""Elements that are sampled of a tensor that is no matrix."""


class Unchanged:
    """Remembers *tensors* by their versions; see [Note: Unchanged]. Keeps them alive."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._samples: list[tuple[Tensor, Tensor | None]] = []

    def take_samples(self) -> None:
        """Remember a sample of each too, as it is now. Waits for nothing."""
        self._samples = [(tensor, _sample(tensor)) for tensor, _ in self._versions]

    def holds(self) -> bool:
        """Whether all of them are as they were. Waits for the device if there are samples."""
        return all(tensor._version == version for tensor, version in self._versions) and all(
            _same_bits(sample, _sample(tensor)) for tensor, sample in self._samples
        )


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor | None:
    """Return a few elements, in memory of their own; None of tensors that cannot be read so."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type == "meta":
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
    bits = (sample.reshape(-1).view(torch.uint8) for sample in (before, now))
    return torch.equal(*bits)
