"""Matrices of layers, and noise, in int8 on their way between host and device.

[Note: Fewer bytes]
A trained weight stays on the host in its own dtype, the master. Its matrices (two dimensions or
more) go to the device in int8, with one float32 scale for a row; vectors go as they are. Passes,
and all other forwards, compute with what the device gets; layers that stay there do not travel. So
int8 is an error of the forward, the same in both passes, and not one of the master: it does not add
up over steps. An element is off by 1/254 of the largest magnitude in its row at most (0.4 % of it).
Rows of more than 16,384 elements have a scale for each piece of that length.

Noise is rounded to multiples of 1/16, for the perturbation and for the update alike: the update
goes along the direction that was tried, bit for bit. Once a step the noise of a block is drawn on
the device to go back to the host in int8, in place of the weights. The host makes the update of the
master of it, before the block's next upload.

Source: ZO2 (arXiv 2503.12668), section 5.5, compresses the weights themselves for both copies, so
that they lose what int8 cannot hold in each step. Here the masters keep it.
"""

from __future__ import annotations

import torch

from hf_pyao.engine.codecs.grouped import GroupedSpec
from hf_pyao.engine.codecs.int8 import Int8Codec

_CODEC = Int8Codec()
_NOISE_LEVELS = 16.0
"""Levels per standard deviation. The largest noise there is, 5.77, is level 92."""
_SCALE_BYTES = 4


def packed_nbytes(size: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes of a weight on its way; of a matrix: codes, a gap for alignment, scales."""
    blank = torch.empty(size, dtype=dtype, device="meta")
    if len(size) < 2 or not _CODEC.accepts(blank):
        return blank.nbytes
    num_scales = -(-size.numel() // _CODEC.group_size(size))
    return min(blank.nbytes, _first_scale(size) + _SCALE_BYTES * num_scales)


def pack(weight: torch.Tensor, memory: torch.Tensor) -> None:
    """Write *weight* to the beginning of *memory*, uint8, (N,), on the same device."""
    size, nbytes = weight.size(), packed_nbytes(weight.size(), weight.dtype)
    if nbytes == weight.nbytes:
        memory[:nbytes].view(weight.dtype).view(size).copy_(weight)
        return
    codes, scales = _CODEC.encode(weight).payload
    memory[: size.numel()].view(torch.int8).copy_(codes)
    memory[_first_scale(size) : nbytes].view(torch.float32).copy_(scales)


def unpack(memory: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return what :func:`pack` has written, of *size* and *dtype*; a view if it is no int8."""
    nbytes = packed_nbytes(size, dtype)
    if nbytes == size.numel() * dtype.itemsize:
        return memory[:nbytes].view(dtype).view(size)
    scales = memory[_first_scale(size) : nbytes].view(torch.float32)
    payload = (memory[: size.numel()].view(torch.int8), scales)
    return _CODEC.decode(payload, GroupedSpec(size, dtype, _CODEC.group_size(size)))


def pack_noise(z: torch.Tensor, memory: torch.Tensor) -> None:
    """Write float32 noise (N,) to *memory*, uint8, (N,): multiples of 1/16, ties to even."""
    memory.view(torch.int8).copy_((z * _NOISE_LEVELS).round_())


def unpack_noise(memory: torch.Tensor) -> torch.Tensor:
    """Return the noise in *memory* as a new float32 tensor, (N,): exact in every dtype."""
    return memory.view(torch.int8).float().mul_(1 / _NOISE_LEVELS)


def rounded_noise(z: torch.Tensor) -> torch.Tensor:
    """Return float32 noise rounded to multiples of 1/16; *z* is used for it."""
    return z.mul_(_NOISE_LEVELS).round_().mul_(1 / _NOISE_LEVELS)


def _first_scale(size: torch.Size) -> int:
    return -(-size.numel() // _SCALE_BYTES) * _SCALE_BYTES
