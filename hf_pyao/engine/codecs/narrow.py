"""Tensors whose values all fit a smaller dtype, exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_pyao.engine.codecs.base import Encoded, Lossless, flatten

_NARROWER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
    torch.float32: (torch.bfloat16, torch.float16),
    torch.int64: (torch.int8, torch.int16, torch.int32),
    torch.int32: (torch.int8, torch.int16),
    torch.int16: (torch.int8,),
}
"""What is tried for each dtype, in order."""

_BITS_DTYPE = {torch.float64: torch.int64, torch.float32: torch.int32}
"""The integers under which floats are compared, so that -0.0 and NaN payloads count."""


class NarrowSpec(NamedTuple):
    """What decoding needs: the tensor's own shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype


class NarrowCodec(Lossless):
    """Sends fp32 that was cast from 16 bits, and small integers of wide dtype, at true width.

    Nothing is assumed: :meth:`encode` narrows, widens again, compares every bit, and sends the
    tensor as it is when no smaller dtype holds it. The answer decides how much memory the payload
    takes, so the host must have it: **encode reads values, and on an accelerator waits for the
    device**. So it is no codec for every step, and no configuration knows it by name.
    Tensors without values (fake, meta) are sent as they are: an upper bound.
    """

    name = "narrow"

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Accept the dtypes that have a narrower one."""
        return tensor.dtype in _NARROWER

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """Return *tensor*'s values in the first narrower dtype that holds them all."""
        flat = flatten(tensor)
        spec = NarrowSpec(tensor.shape, tensor.dtype)
        if type(tensor) is torch.Tensor and not tensor.is_meta:
            for dtype in _NARROWER[tensor.dtype]:
                narrowed = flat.to(dtype)
                if torch.equal(_bits(narrowed.to(flat.dtype)), _bits(flat)):
                    return Encoded((narrowed,), spec)
        return Encoded((flat,), spec)

    def decode(self, payload: tuple[torch.Tensor, ...], spec: NarrowSpec) -> torch.Tensor:
        """Widen to the tensor's own dtype and shape."""
        return payload[0].to(spec.dtype).view(spec.shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dtype = _BITS_DTYPE.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)
