"""Copies of a layer's weights in the dtype of autocast, on the host, for uploads to read.

The masters stay in their stored dtype. An upload of the copies has half the bytes, and nothing is
cast on the device. Rounding to the nearest is the same on the host as on the device, so bits are
those of autocast's own cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.master import Master

ITEMSIZE = 2
"""Bytes of an element: autocast casts to bfloat16 or float16."""


class ComputeDtype:
    """The dtype that autocast casts to, one for all layers of a model."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        """None until the first forward under autocast. It does not change after that."""

    def note(self, dtype: torch.dtype) -> bool:
        """Note that a layer runs under autocast to *dtype*; return True if that is news."""
        if self.dtype is not None or dtype.itemsize != ITEMSIZE:
            return False
        self.dtype = dtype
        return True


class ConvertedWeights:
    """Copies of weights of one layer.

    Args:
        masters: the weights; float32.
        compute: the dtype of the copies.
    """

    def __init__(self, masters: Sequence[Master], compute: ComputeDtype) -> None:
        self.compute = compute
        self.memory: torch.Tensor | None = None
        """uint8, on the host, shape (:attr:`nbytes`,); None until it is reserved."""
        self.offsets: dict[str, int] = {}
        """By name of a weight, its first byte."""
        self.nbytes = 0
        """Bytes of host memory."""
        self._masters = tuple(masters)
        self._is_stale = True
        for master in masters:
            self.offsets[master.name] = self.nbytes
            self.nbytes += aligned(master.nbytes // master.dtype.itemsize * ITEMSIZE)

    def may_have_changed(self) -> None:
        """Note that the weights may hold something else than before."""
        self._is_stale = True

    def take_memory(self, memory: torch.Tensor | None) -> None:
        """Write the copies to *memory*; None: there is none for them."""
        self.memory = memory

    def go_on_from(self, held: ConvertedWeights) -> None:
        """Have the memory of *held*, which has the same weights."""
        self.memory, self._is_stale = held.memory, True

    def to_upload(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the copies as bytes, brought up to date.

        Args:
            stored: the memory of the layer's weights, uint8, on the host.
        """
        assert self.memory is not None
        assert self.compute.dtype is not None
        if self._is_stale:
            with torch.no_grad():
                for master in self._masters:
                    first = self.offsets[master.name]
                    copied = _view(self.memory, first, self.compute.dtype, master)
                    copied.copy_(_view(stored, master.offset, master.dtype, master))
            self._is_stale = False
        return self.memory


def _view(memory: torch.Tensor, first: int, dtype: torch.dtype, master: Master) -> torch.Tensor:
    """View bytes of *memory* from *first* on as *master* lies."""
    num_elements = master.nbytes // master.dtype.itemsize
    flat = memory[first : first + num_elements * dtype.itemsize].view(dtype)
    return flat.as_strided(master.size, master.stride)
