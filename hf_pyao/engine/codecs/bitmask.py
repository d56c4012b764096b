"""Boolean masks, eight to a byte."""

from __future__ import annotations

import torch

from hf_pyao.engine.codecs.backend import kernels_for
from hf_pyao.engine.codecs.base import Encoded, Lossless, flatten

_BITS = 8


class BitmaskCodec(Lossless):
    """Packs bool tensors at one bit per value: an eighth of the bytes.

    A payload of ``ceil(numel / 8)`` uint8; value *i* is bit ``i % 8`` of byte ``i // 8``. A byte
    other than 0 and 1, which only viewing other data as bool can put there, comes back as the True
    that it stands for.
    """

    name = "bitmask"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Accept bool tensors."""
        return tensor.dtype == torch.bool

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """Pack *tensor* into one uint8 tensor."""
        flags = flatten(tensor).view(torch.uint8)
        kernels = kernels_for(flags)
        packed = kernels.pack_bits(flags) if kernels else _pack_bits(flags)
        return Encoded((packed,), tensor.shape)

    def decode(self, payload: tuple[torch.Tensor, ...], spec: torch.Size) -> torch.Tensor:
        """Unpack into a bool tensor of shape *spec*."""
        (packed,) = payload
        kernels = kernels_for(packed)
        unpack = kernels.unpack_bits if kernels else _unpack_bits
        flags: torch.Tensor = unpack(packed, spec.numel())
        return flags.view(torch.bool).view(spec)


def _pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """(n,) uint8, zero or not → (ceil(n / 8),) uint8."""
    ones = flags.ne(0).view(torch.uint8)
    octets = torch.nn.functional.pad(ones, (0, -ones.numel() % _BITS)).view(-1, _BITS)
    packed = octets[:, 0].clone()
    for bit in range(1, _BITS):
        packed |= octets[:, bit] << bit
    return packed


def _unpack_bits(packed: torch.Tensor, num_values: int) -> torch.Tensor:
    """(ceil(n / 8),) uint8 → (n,) uint8 of 0 and 1."""
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    ones = (packed[:, None] >> shifts).bitwise_and_(1)
    return ones.view(-1)[:num_values]
