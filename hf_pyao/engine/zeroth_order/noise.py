"""Normal noise from a counter: each element's value depends on its own place alone.

[Note: Noise]
The noise of element ``i`` (in the order of a contiguous tensor) of a parameter in a step is:

- key: the first 8 bytes of SHA-256 of ``f"{seed}:{name}"`` in UTF-8, as two little-endian 32-bit
  words; ``name`` is the parameter's first name in ``model.named_parameters()``, without the parts
  that wrappers add. A tied parameter has one name, so it has one noise.
- counter: four 32-bit words, the low and high word of ``i // 4`` and of ``step``.
- Philox4x32-10 makes four words of these (Salmon et al., "Parallel random numbers: as easy as
  1, 2, 3", SC 2011, section 3.3). Each word's upper 24 bits are an integer ``k``.
- Box-Muller makes two normals of two words: ``r * cos(t)`` and ``r * sin(t)`` with
  ``r = sqrt(-2 ln((k0 + 1) / 2**24))`` and ``t = 2 pi k1 / 2**24``. Words 0 and 1 give elements
  0 and 1 of the four, words 2 and 3 give elements 2 and 3.

Logarithm, sine and cosine are polynomials (those of Cephes, Moshier 1992, in single precision),
written as float32 products and sums that are rounded one by one. So the bits are the same on every
device, in any order of the elements, and on any number of processes; a library's ``log`` would
round differently on another device. The root is the correctly rounded float32 root.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_WORDS = 4
"""Words, and elements, of one counter."""

_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LN2_LOW, _LN2_HIGH = -2.12194440e-4, 0.693359375
_SQRT_HALF = 0.70710678
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_HALF_PI = 1.5707963
_QUADRANT = 1 << 22


@dataclass(frozen=True)
class NoiseKey:
    """The key of one parameter's noise: two 32-bit words."""

    low: int
    high: int

    @classmethod
    def of(cls, seed: int, name: str) -> NoiseKey:
        """Return the key of the parameter *name* under *seed*."""
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))


def noise(key: NoiseKey, step: int, first: int, end: int, device: torch.device) -> torch.Tensor:
    """Return the normal noise of elements *first* to *end* (excluded) of a parameter.

    See [Note: Noise]. About 30 bytes of memory per element are used meanwhile.

    Args:
        key: of the parameter.
        step: number of the step, from 0 on.
        first: the first element.
        end: the one behind the last.
        device: where it is drawn; the bits do not depend on it.

    Returns:
        float32, shape (end - first,).
    """
    start = first // _WORDS
    counters = torch.arange(start, -(-end // _WORDS), dtype=torch.int64, device=device)
    offset = first - start * _WORDS
    return _normals(counters, step, key).view(-1)[offset : offset + end - first]


def _normals(counters: torch.Tensor, step: int, key: NoiseKey) -> torch.Tensor:
    """Return the four normals of each counter: float32, shape (N, 4)."""
    low, high = counters & _WORD, counters >> 32
    words = _philox(low, high, step & _WORD, (step >> 32) & _WORD, key)
    return torch.stack((*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])), 1)


def _philox(
    low: torch.Tensor, high: torch.Tensor, step_low: int, step_high: int, key: NoiseKey
) -> tuple[torch.Tensor, ...]:
    """Return the four words of each counter; int64 tensors hold the 32-bit words."""
    c0, c1 = low, high
    c2, c3 = torch.full_like(low, step_low), torch.full_like(low, step_high)
    k0, k1 = key.low, key.high
    for _ in range(_ROUNDS):
        # int64 products wrap around: their bits are those of the unsigned product.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c1 = second.bitwise_and_(_WORD)
        c2 = (first >> 32).bitwise_and_(_WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c3 = first.bitwise_and_(_WORD)
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _box_muller(
    of_radius: torch.Tensor, of_angle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two normals of two words; float32."""
    uniform = ((of_radius >> 8) + 1).to(torch.float32) * 2.0**-24
    # In float64: some libraries' float32 root is not rounded correctly.
    radius = torch.sqrt((_log(uniform) * -2.0).to(torch.float64)).to(torch.float32)
    angle = of_angle >> 8
    quadrant = (angle + _QUADRANT // 2) >> 22
    x = (angle - quadrant * _QUADRANT).to(torch.float32) * 2.0**-22 * _HALF_PI
    square = x * x
    sine = _polynomial(_SINE, square) * square * x + x
    cosine = _polynomial(_COSINE, square) * square * square - square * 0.5 + 1.0
    is_odd = (quadrant & 1) == 1
    cos, sin = torch.where(is_odd, sine, cosine), torch.where(is_odd, cosine, sine)
    cos = torch.where(((quadrant + 1) & 2) == 2, -cos, cos)
    sin = torch.where((quadrant & 2) == 2, -sin, sin)
    return radius * cos, radius * sin


def _log(value: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of float32 values in (0, 1]."""
    mantissa, exponent = torch.frexp(value)
    is_low = mantissa < _SQRT_HALF
    power = exponent.to(torch.float32) - is_low.to(torch.float32)
    x = torch.where(is_low, mantissa + mantissa, mantissa) - 1.0
    square = x * x
    result = _polynomial(_LOG, x) * x * square
    result = result + power * _LN2_LOW - square * 0.5
    return x + result + power * _LN2_HIGH


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """Return the polynomial of *x*, highest power first, by Horner's rule."""
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result
