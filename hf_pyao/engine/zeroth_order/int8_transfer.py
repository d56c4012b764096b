"""Matrices of layers, and noise, in int8 on their way between host and device.

[Note: Fewer bytes]
A trained weight stays on the host in its own dtype, the master. Its matrices (two dimensions or
more) go to the device in int8, with one float32 scale for a row; vectors go as they are. Passes,
and all other forwards, compute with what the device gets. So int8 is an error of the forward, the
same in both passes, and not one of the master: it does not add up over steps. An element is off by
1/254 of the largest magnitude in its row at most (0.4 % of it). Rows of more than 16,384 elements
have a scale for each piece of that length.

Noise is rounded to multiples of 1/16, for the perturbation and for the update alike: the update
goes along the direction that was tried, bit for bit. On the device the noise of a block is drawn
once a step and goes back to the host in int8, in place of the weights. The host makes the update of
the master of it, before the block's next upload.

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


def packs(size: torch.Size, dtype: torch.dtype) -> bool:
    """Say whether a weight travels in int8: a matrix that the codec takes and that gets smaller."""
    blank = torch.empty(size, dtype=dtype, device="meta")
    return len(size) > 1 and _CODEC.accepts(blank) and packed_nbytes(size) < blank.nbytes


def packed_nbytes(size: torch.Size) -> int:
    """Return the bytes of a matrix on its way: codes, a gap up to the scales' alignment, scales."""
    return _first_scale(size) + _SCALE_BYTES * _num_scales(size)


def pack(matrix: torch.Tensor, memory: torch.Tensor) -> None:
    """Write *matrix* to *memory*: uint8, (:func:`packed_nbytes`,), on the same device."""
    codes, scales = _CODEC.encode(matrix.detach()).payload
    first = _first_scale(matrix.size())
    memory[: codes.numel()].view(torch.int8).copy_(codes)
    memory[first : first + scales.nbytes].view(torch.float32).copy_(scales)


def unpack(memory: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return what :func:`pack` has written as a new contiguous tensor of *size* and *dtype*."""
    first = _first_scale(size)
    end = first + _SCALE_BYTES * _num_scales(size)
    payload = (memory[: size.numel()].view(torch.int8), memory[first:end].view(torch.float32))
    return _CODEC.decode(payload, GroupedSpec(size, dtype, _CODEC.group_size(size)))


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Return *matrix* as it would come to the device, as a new tensor."""
    memory = torch.empty(packed_nbytes(matrix.size()), dtype=torch.uint8, device=matrix.device)
    pack(matrix, memory)
    return unpack(memory, matrix.size(), matrix.dtype)


def pack_noise(z: torch.Tensor, memory: torch.Tensor) -> None:
    """Write float32 noise (N,) to *memory*, uint8, (N,): multiples of 1/16, ties to even."""
    memory.view(torch.int8).copy_((z * _NOISE_LEVELS).round_())


def unpack_noise(memory: torch.Tensor) -> torch.Tensor:
    """Return the noise in *memory* as a new float32 tensor, (N,): exact in every dtype."""
    return memory.view(torch.int8).float().mul_(1 / _NOISE_LEVELS)


def rounded_noise(z: torch.Tensor) -> torch.Tensor:
    """Return float32 noise rounded to multiples of 1/16; *z* is used for it."""
    return z.mul_(_NOISE_LEVELS).round_().mul_(1 / _NOISE_LEVELS)


def _num_scales(size: torch.Size) -> int:
    return -(-size.numel() // _CODEC.group_size(size))


def _first_scale(size: torch.Size) -> int:
    return -(-size.numel() // _SCALE_BYTES) * _SCALE_BYTES
