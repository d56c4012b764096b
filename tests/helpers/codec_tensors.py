"""Hypothesis strategies that draw tensors of every shape, stride, dtype and ugliness."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)

_INTEGERS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "every other": lambda x: torch.stack((x, x), -1)[..., 1],
    "offset": lambda x: torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[min(1, x.numel()) :].view(
        x.shape
    ),
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns, so that -0.0 and NaN compare as they should."""
    return tensor.contiguous().view(_INTEGERS_OF_SIZE[tensor.element_size()])


def _floats(
    shape: tuple[int, ...], dtype: torch.dtype, magnitude: float, oddities: bool, seed: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude
    flat = values.view(-1)
    if flat.numel():
        info = torch.finfo(dtype)
        odd = [0.0, -0.0, info.smallest_normal, info.smallest_normal / 4, 1e4 * magnitude]
        if oddities:
            odd += [math.nan, math.inf, -math.inf, info.max, info.min]
        places = torch.randint(flat.numel(), (1 + flat.numel() // 16,), generator=generator)
        kinds = torch.randint(len(odd), places.shape, generator=generator)
        flat[places] = torch.tensor(odd, dtype=torch.float64)[kinds]
    return values.to(dtype)


def _integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    top = 2 ** min(8 * dtype.itemsize - 1, 1 + seed % 62)
    low = 0 if dtype == torch.uint8 else -top
    return torch.randint(low, top, shape, generator=generator).to(dtype)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS + OTHERS) -> torch.Tensor:
    """Draw a tensor: up to 3 dimensions of 0…140, any layout; floats with NaN, inf and the like."""
    shape = tuple(draw(st.lists(st.integers(0, 7) | st.integers(0, 140), max_size=2)))
    if draw(st.booleans()):
        shape = (draw(st.integers(0, 3)), *shape)
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**32 - 1))
    if dtype.is_floating_point:
        magnitude = draw(st.sampled_from([1.0, 1e-3, 30.0, 1e-7, 1e-30, 1e-44, 1e30]))
        values = _floats(shape, dtype, magnitude, draw(st.booleans()), seed)
        if dtype in (torch.float32, torch.float64) and draw(st.booleans()):
            values = values.bfloat16().to(dtype)
    else:
        values = _integers(shape, dtype, seed)
    return _LAYOUTS[draw(st.sampled_from(sorted(_LAYOUTS)))](values)
