"""Fingerprints of tensors: 64 bits that tell whether two tensors hold the same raw bits.

A layer that runs again must save in its second run what it saved in its first. The first run's
tensors are gone by then, so their fingerprints are compared instead. A fingerprint never leaves
the device: the comparison adds to a counter there, which the host reads once a step.

The bits of a tensor are read as integers ``x[r, c]`` in rows of :data:`ROW_LENGTH`. The
fingerprint is the sum over all of them of ``x[r, c] * (u[c] + v[r])``, modulo 2**64, with
pseudo-random numbers, odd ``u`` and even ``v``. Each position has a weight of its own, and all
weights are odd, so that a change of one integer always changes the sum. The sum needs no temporary
of the tensor's size: it equals ``sum_c u[c] * (sum of column c) + sum_r v[r] * (sum of row r)``,
two reductions over the data.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from hf_pyao.engine.runtime.flattened_tensor import inner_tensors
from hf_pyao.engine.transfer.compute_streams import current_stream
from hf_pyao.engine.transfer.layout import TensorLayout, view_of_storage

ROW_LENGTH = 2048
"""Integers in a row."""

_MAX_CACHED_WEIGHTS = 1 << 22

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as
signed numbers."""

_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Fingerprinter:
    """Computes fingerprints; it keeps the weights of positions that it has made, by stream."""

    def __init__(self) -> None:
        self._weights: dict[_Place, Tensor] = {}

    def release(self) -> None:
        """Free the weights: the next fingerprint makes them anew."""
        self._weights.clear()

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """Return the fingerprint of *tensor*, on its device and current stream.

        It depends on the bits of the elements and their order in memory, on nothing else: not on
        dtype, shape or strides. NaNs with equal bits are equal; 0.0 and -0.0 differ.

        Args:
            tensor: strided, of any dtype, shape and device. A dense tensor is read in place, in
                the order of its memory; one with gaps or overlaps is copied first. Of a tensor
                subclass that is made of other tensors, these are read.

        Returns:
            An int64 tensor without dimensions.
        """
        if type(tensor) is not Tensor and (parts := inner_tensors(tensor)):
            found = torch.stack([self.of(part) for part in parts])
            return (found * self._weights_for(found.device, len(parts))).sum()
        words = _words_of(tensor)
        whole, rest = divmod(words.numel(), ROW_LENGTH)
        if rest:
            return self._of_whole(words[:-rest], whole) + self._of_tail(words[-rest:], whole)
        return self._of_whole(words, whole)

    def _of_whole(self, words: Tensor, num_rows: int) -> Tensor:
        """Return the sum over *num_rows* whole rows; few kernels, since it is hot."""
        device = words.device
        if not num_rows:
            return torch.zeros((), dtype=torch.int64, device=device)
        rows = words.view(num_rows, ROW_LENGTH)
        sums = torch.empty(ROW_LENGTH + num_rows, dtype=torch.int64, device=device)
        torch.sum(rows, 0, dtype=torch.int64, out=sums[:ROW_LENGTH])
        torch.sum(rows, 1, dtype=torch.int64, out=sums[ROW_LENGTH:])
        return sums.mul_(self._weights_for(device, sums.numel())).sum()

    def _of_tail(self, words: Tensor, row: int) -> Tensor:
        """Return the sum over the part of a row that ends a tensor."""
        weights = self._weights_for(words.device, ROW_LENGTH + row + 1)
        return (words * (weights[: words.numel()] + weights[ROW_LENGTH + row])).sum()

    @torch.no_grad()
    def projection(self, tensor: Tensor) -> Tensor:
        """Return the projection of a floating *tensor* on a vector of signs, and its norm.

        The signs are pseudo-random and belong to positions in memory.

        Returns:
            A float32 tensor of shape (2,), on the device of *tensor*.
        """
        flat = _flat(tensor)
        whole = flat.numel() // ROW_LENGTH
        weights = self._weights_for(tensor.device, ROW_LENGTH + whole + 1)
        signs = ((weights >> 7) & 2).to(torch.float32) - 1
        rows = flat[: whole * ROW_LENGTH].view(whole, ROW_LENGTH)
        tail = flat[whole * ROW_LENGTH :].to(torch.float32)
        sums = torch.mv(rows, signs[:ROW_LENGTH].to(rows.dtype)).to(torch.float32)
        found = (sums * signs[ROW_LENGTH:-1]).sum()
        found += (tail * signs[: tail.numel()]).sum() * signs[-1]
        wide = torch.promote_types(rows.dtype, torch.float32)
        squares = torch.linalg.vector_norm(rows, dtype=wide).to(torch.float32).square()
        return torch.stack((found, (squares + tail.square().sum()).sqrt()))

    def _weights_for(self, device: torch.device, count: int) -> Tensor:
        """Return weights of columns, odd, and behind them those of rows, even."""
        place = _place(device)
        known = self._weights.get(place)
        if known is None or known.numel() < count:
            known = _mixed(torch.arange(1, 2 * count + 1, dtype=torch.int64, device=device))
            known[ROW_LENGTH:] -= 1
            if known.numel() <= _MAX_CACHED_WEIGHTS:
                self._weights[place] = known
        return known[:count]


_Place: TypeAlias = tuple[torch.device, torch.Stream | None]


def _place(device: torch.device) -> _Place:
    """Return *device* and its current stream, for weights that one stream makes and reads.

    A stream may reuse memory that another one still reads, and does not wait for the other's
    kernels.
    """
    return device, current_stream(device)


def _mixed(numbers: Tensor) -> Tensor:
    """Return a pseudo-random odd number for each of *numbers*: splitmix64's finaliser."""
    golden, first, second = _MULTIPLIERS
    mixed = numbers * golden
    mixed = (mixed ^ _shifted(mixed, 30)) * first
    mixed = (mixed ^ _shifted(mixed, 27)) * second
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Shift right without the sign, which int64's own shift repeats."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _words_of(tensor: Tensor) -> Tensor:
    """View the bits of *tensor* as a flat tensor of integers, as wide as they fit."""
    tensor = _flat(tensor)
    layout = TensorLayout(tensor)
    start = layout.offset * tensor.element_size()
    width, dtype = next(
        (width, dtype)
        for width, dtype in _WORDS
        if start % width == 0 and layout.nbytes % width == 0
    )
    blank = torch.empty(0, dtype=dtype, device=tensor.device)
    count = layout.nbytes // width
    return view_of_storage(blank, tensor.untyped_storage(), start // width, (count,), (1,))


def _flat(tensor: Tensor) -> Tensor:
    """View *tensor* as flat, in the order of its memory; it is copied if it has gaps."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not TensorLayout(tensor).is_dense:
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
