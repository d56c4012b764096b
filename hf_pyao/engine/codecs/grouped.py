"""What int8, int4 and fp8 share: one symmetric scale for each group of consecutive values.

[Note: Scales and codes]
A tensor's values, in index order, are cut into groups, each encoded by itself. With ``top`` the
grid's largest level (127 for int8)::

    amax  = max(largest |x| among the group's finite values, 2**-93)
    scale = amax * (1 / top)            in float32; the factor is rounded to float32 once
    code  = level nearest to x / scale  true division in float32; ties to even

NaN and infinities survive in place. A group that holds any stores its scale *negative*; its finite
values then end one level earlier (``top_beside_nonfinite``: 126), which frees the codes of
``±top`` for ±inf, and a code beyond all levels stands for NaN. So nothing is decided on the host,
the payload does not grow, and groups of finite values, nearly all there are, use the whole grid.

The floor of 2**-93 keeps every quotient finite, and every float32 denormal far below half a level:
a device that flushes denormals to zero gives the same codes.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch

from hf_pyao.engine.codecs.backend import kernels_for
from hf_pyao.engine.codecs.base import Encoded, flatten
from hf_pyao.engine.codecs.grid import AMAX_FLOOR, MAX_KERNEL_GROUP, Grid

_ACCEPTED = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_BYTES = 4
_FP32_SLACK = 2.0**-22
"""Covers the roundings of the division and the multiplication, relative to the value."""


class GroupedSpec(NamedTuple):
    """What decoding needs besides the payload."""

    shape: torch.Size
    dtype: torch.dtype
    group_size: int


class GroupedCodec(abc.ABC):
    """A lossy codec with one scale per group; subclasses give the grid, the groups, the packing.

    The payload is ``(codes, scales)``: ``ceil(numel * bits / 8)`` one-byte codes in index order,
    and one float32 per group. Only the last group may be shorter than ``group_size``.
    """

    name: str
    grid: Grid
    is_lossless = False

    @property
    def max_relative_error(self) -> float:
        """Largest error over the group's largest finite magnitude, for every accepted dtype.

        Half the coarsest step, and the rounding of the result to the tensor's own dtype, which is
        at most half a unit of bfloat16. Holds for groups whose largest finite magnitude is at least
        2**-93 and a normal number of the dtype.
        """
        half_step = 0.5 * self.grid.coarsest_step / self.grid.top_beside_nonfinite
        half_unit = 2.0**-8 * (1 + half_step)
        return half_step + min(half_step, half_unit) + 2 * _FP32_SLACK

    @abc.abstractmethod
    def group_size(self, shape: torch.Size) -> int:
        """Return how many consecutive values of a tensor of this shape share a scale (≥ 1)."""

    @abc.abstractmethod
    def to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round to the grid, pack. (num_groups, group_size) float32 → (num_groups, …) one byte.

        May work in place: *scaled* is not needed again.
        """

    @abc.abstractmethod
    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Unpack. (num_groups, …) one byte → (num_groups, group_size) levels, new, float32."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Accept float32, bfloat16 and float16, where encoding saves bytes.

        Not float64, which is chosen for its digits, and not shapes (…, 1): statistics of a norm,
        whose error would spread over a whole row. A logsumexp, (batch, heads, sequence), looks like
        any hidden state from here: keeping those from lossy codecs is up to the caller.
        """
        if tensor.dtype not in _ACCEPTED or tensor.shape[-1:] == (1,):
            return False
        num_groups = -(-tensor.numel() // self.group_size(tensor.shape))
        encoded_bytes = self._num_codes(tensor.numel()) + num_groups * _SCALE_BYTES
        return encoded_bytes < tensor.numel() * tensor.element_size()

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """Quantise *tensor*, of any strides, on its device and the current stream."""
        spec = GroupedSpec(tensor.shape, tensor.dtype, self.group_size(tensor.shape))
        flat = flatten(tensor)
        kernels = kernels_for(flat) if spec.group_size <= MAX_KERNEL_GROUP else None
        if kernels:
            return Encoded(kernels.encode_groups(flat, spec.group_size, self.grid), spec)
        groups = _in_groups(flat, spec.group_size)
        scales = compute_scales(groups, self.grid)
        scaled = groups.to(torch.float32, copy=True).div_(scales.abs())
        scaled.nan_to_num_(self.grid.nan, self.grid.top, -self.grid.top)
        codes = self.to_codes(scaled).view(-1)[: self._num_codes(flat.numel())]
        return Encoded((codes, scales.view(-1)), spec)

    def decode(self, payload: tuple[torch.Tensor, ...], spec: GroupedSpec) -> torch.Tensor:
        """Return the dequantised tensor, contiguous, in its own dtype and shape."""
        codes, scales = payload
        kernels = kernels_for(codes) if spec.group_size <= MAX_KERNEL_GROUP else None
        if kernels:
            flat: torch.Tensor = kernels.decode_groups(
                codes, scales, spec.group_size, self.grid, spec.shape.numel(), spec.dtype
            )
            return flat.view(spec.shape)
        levels = self.from_codes(_in_groups(codes, spec.group_size * self.grid.bits // 8))
        values = _from_levels(levels, scales[:, None], self.grid).to(spec.dtype)
        return values.view(-1)[: spec.shape.numel()].view(spec.shape)

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bound on each value's error: float64 of *tensor*'s shape.

        Half a step of the grid, and the rounding to the tensor's own dtype. The latter is never
        more than the former: *tensor* is on the dtype's grid itself, so the nearest point of that
        grid is at least as near as *tensor* is.
        """
        groups = _in_groups(flatten(tensor), self.group_size(tensor.shape))
        scales = compute_scales(groups, self.grid).abs().double()
        magnitudes = groups.double().abs()
        steps = (magnitudes * self.grid.relative_step).maximum(scales * self.grid.finest_step)
        half_step = 0.5 * steps + (magnitudes + steps) * _FP32_SLACK
        dtype = torch.finfo(tensor.dtype)
        half_unit = 0.5 * dtype.eps * ((magnitudes + half_step).clamp(min=dtype.tiny))
        bound = (half_step + half_step.minimum(half_unit)).where(magnitudes.isfinite(), 0.0)
        return bound.view(-1)[: tensor.numel()].view(tensor.shape)

    def _num_codes(self, num_values: int) -> int:
        return -(-num_values * self.grid.bits // 8)


def compute_scales(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return each group's scale, negative where the group holds NaN or infinities.

    *groups*: (num_groups, group_size), floating → (num_groups, 1) float32.
    """
    magnitudes = groups.abs()
    has_nonfinite = magnitudes.amax(-1, keepdim=True).isfinite().logical_not_()
    amax = magnitudes.nan_to_num_(0.0, 0.0, 0.0).amax(-1, keepdim=True).float()
    amax.clamp_(min=AMAX_FLOOR)
    # Times the reciprocal, not divided by the number: for a plain number, torch on CUDA does the
    # former whatever is written, and a CPU does the latter.
    flagged = amax * (-1 / grid.top_beside_nonfinite)
    return flagged.where(has_nonfinite, amax * (1 / grid.top))


def _from_levels(levels: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """(num_groups, group_size) levels, (num_groups, 1) scales → float32 values, in place."""
    is_flagged = scales < 0
    is_readable = scales.device.type == "cpu" and type(scales) is torch.Tensor
    if is_readable and not is_flagged.any():  # elsewhere looking would mean waiting
        return levels.mul_(scales)
    is_infinite = (levels == grid.top).logical_and_(is_flagged)
    is_minus_infinite = (levels == -grid.top).logical_and_(is_flagged)
    is_nan = levels == grid.nan
    values = levels.mul_(scales.abs())
    values.masked_fill_(is_infinite, torch.inf).masked_fill_(is_minus_infinite, -torch.inf)
    return values.masked_fill_(is_nan, torch.nan)


def _in_groups(flat: torch.Tensor, group_size: int) -> torch.Tensor:
    """(n,) → (num_groups, group_size), the last group filled up with zeros."""
    missing = -flat.numel() % group_size
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, group_size)
