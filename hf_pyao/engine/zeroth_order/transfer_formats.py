"""Formats in which weights of layers and their noise cross the link in fewer bytes.

[Note: Fewer bytes]
A trained weight stays on the host in its own dtype, the master. Its matrices (two dimensions or
more) go to the device in the format; vectors go as they are. Passes, and all other forwards,
compute with what the device gets. So a format is an error of the forward, the same in both passes,
and not one of the master: it does not add up over steps.

Noise is rounded to a grid of the format, for the perturbation and for the update alike: the update
goes along the direction that was tried, bit for bit. On the device the noise of a block is drawn
once a step and goes back to the host in the format, in place of the weights. The host makes the
update of the master of it, before the block's next upload.

Source: ZO2 (arXiv 2503.12668), section 5.5, compresses the weights themselves for both copies, so
that they lose what the format cannot hold in each step. Here the masters keep it.
"""

from __future__ import annotations

import abc

import torch

from hf_pyao.engine.codecs.base import flatten
from hf_pyao.engine.codecs.grouped import GroupedSpec
from hf_pyao.engine.codecs.int8 import Int8Codec
from hf_pyao.errors import unknown_name

_NOISE_LEVELS = 16.0
"""Levels per standard deviation of noise in int8. The largest noise there is, 5.77, is level 92."""
_BF16_HALF_UNIT = 2.0**-8
_BF16_LEAST_HALF_UNIT = 2.0**-134
"""Of numbers below the least normal one."""
_SCALE_BYTES = 4


class TransferFormat(abc.ABC):
    """How matrices and noise look on their way; see [Note: Fewer bytes]."""

    name: str
    noise_itemsize: int
    """Bytes of an element's noise."""

    @abc.abstractmethod
    def packs(self, size: torch.Size, dtype: torch.dtype) -> bool:
        """Say whether a weight of *size* and *dtype* takes fewer bytes in the format."""

    @abc.abstractmethod
    def packed_nbytes(self, size: torch.Size) -> int:
        """Return the bytes of a matrix on its way."""

    @abc.abstractmethod
    def pack(self, matrix: torch.Tensor, memory: torch.Tensor) -> None:
        """Write *matrix* to *memory*: uint8, (:meth:`packed_nbytes`,), on the same device."""

    @abc.abstractmethod
    def unpack(self, memory: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return what :meth:`pack` has written as a new contiguous tensor of *size* and *dtype*."""

    def rounded(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return *matrix* as it would come to the device, as a new tensor."""
        nbytes = self.packed_nbytes(matrix.size())
        memory = torch.empty(nbytes, dtype=torch.uint8, device=matrix.device)
        self.pack(matrix, memory)
        return self.unpack(memory, matrix.size(), matrix.dtype)

    @abc.abstractmethod
    def error_bound(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each element on its way: float64, the matrix's shape."""

    @abc.abstractmethod
    def pack_noise(self, z: torch.Tensor, memory: torch.Tensor) -> None:
        """Write float32 noise (N,) to *memory*: uint8, (N * noise_itemsize,)."""

    @abc.abstractmethod
    def unpack_noise(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the noise in *memory* as a new float32 tensor, (N,)."""

    @abc.abstractmethod
    def rounded_noise(self, z: torch.Tensor) -> torch.Tensor:
        """Return float32 noise on the grid of the format; *z* may be used for it."""


class Bfloat16(TransferFormat):
    """float32 matrices in bfloat16. An element is off by 1/256 of itself at most (0.4 %)."""

    name = "bfloat16"
    noise_itemsize = 2

    def packs(self, size: torch.Size, dtype: torch.dtype) -> bool:
        """Say True of float32 matrices."""
        return len(size) > 1 and dtype == torch.float32

    def packed_nbytes(self, size: torch.Size) -> int:
        """Return two bytes for each element."""
        return 2 * size.numel()

    def pack(self, matrix: torch.Tensor, memory: torch.Tensor) -> None:
        """Round to the nearest bfloat16."""
        memory.view(torch.bfloat16).copy_(flatten(matrix))

    def unpack(self, memory: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements in *dtype*, which holds them all."""
        return memory.view(torch.bfloat16).to(dtype, copy=True).view(size)

    def error_bound(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return half a unit in the last place of bfloat16."""
        return matrix.double().abs().mul_(_BF16_HALF_UNIT).clamp_(min=_BF16_LEAST_HALF_UNIT)

    def pack_noise(self, z: torch.Tensor, memory: torch.Tensor) -> None:
        """Round to the nearest bfloat16."""
        memory.view(torch.bfloat16).copy_(z)

    def unpack_noise(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the same numbers in float32."""
        return memory.view(torch.bfloat16).float()

    def rounded_noise(self, z: torch.Tensor) -> torch.Tensor:
        """Return the nearest bfloat16 in float32."""
        return z.bfloat16().float()


class Int8(TransferFormat):
    """Matrices in int8, with one float32 scale for a row; noise in sixteenths.

    An element is off by 1/254 of the largest magnitude in its row at most (0.4 % of it). Rows of
    more than 16,384 elements have a scale for each piece of that length.
    """

    name = "int8"
    noise_itemsize = 1

    def __init__(self) -> None:
        self._codec = Int8Codec()

    def packs(self, size: torch.Size, dtype: torch.dtype) -> bool:
        """Say True of matrices that the codec takes and that get smaller."""
        blank = torch.empty(size, dtype=dtype, device="meta")
        smaller = self.packed_nbytes(size) < blank.nbytes
        return len(size) > 1 and self._codec.accepts(blank) and smaller

    def packed_nbytes(self, size: torch.Size) -> int:
        """Return the bytes of codes, a gap up to the scales' alignment, and scales."""
        return self._first_scale(size) + _SCALE_BYTES * self._num_scales(size)

    def pack(self, matrix: torch.Tensor, memory: torch.Tensor) -> None:
        """Write codes, then scales."""
        codes, scales = self._codec.encode(matrix.detach()).payload
        first = self._first_scale(matrix.size())
        memory[: codes.numel()].view(torch.int8).copy_(codes)
        memory[first : first + scales.nbytes].view(torch.float32).copy_(scales)

    def unpack(self, memory: torch.Tensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return codes times scales, rounded to *dtype*."""
        first = self._first_scale(size)
        end = first + _SCALE_BYTES * self._num_scales(size)
        payload = (memory[: size.numel()].view(torch.int8), memory[first:end].view(torch.float32))
        return self._codec.decode(payload, GroupedSpec(size, dtype, self._codec.group_size(size)))

    def error_bound(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return half a step of the row's scale, and the rounding to the matrix's dtype."""
        return self._codec.error_bound(matrix.detach())

    def pack_noise(self, z: torch.Tensor, memory: torch.Tensor) -> None:
        """Write the nearest multiple of 1/16, ties to even."""
        memory.view(torch.int8).copy_((z * _NOISE_LEVELS).round_())

    def unpack_noise(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the multiples of 1/16: exact in every dtype."""
        return memory.view(torch.int8).float().mul_(1 / _NOISE_LEVELS)

    def rounded_noise(self, z: torch.Tensor) -> torch.Tensor:
        """Return the nearest multiple of 1/16."""
        return z.mul_(_NOISE_LEVELS).round_().mul_(1 / _NOISE_LEVELS)

    def _num_scales(self, size: torch.Size) -> int:
        return -(-size.numel() // self._codec.group_size(size))

    @staticmethod
    def _first_scale(size: torch.Size) -> int:
        return -(-size.numel() // _SCALE_BYTES) * _SCALE_BYTES


FORMATS: dict[str, type[TransferFormat]] = {each.name: each for each in (Bfloat16, Int8)}


def format_of(name: str) -> TransferFormat:
    """Return the format of a name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in FORMATS:
        raise unknown_name("transfer_dtype", name, tuple(FORMATS))
    return FORMATS[name]()
