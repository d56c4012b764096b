"""MeZO on a resident model, as short as it can be: what zeroth order is judged by.

It shares nothing with hf_pyao. The noise is drawn in numpy, by the definition of the counter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

_F = np.float32


def counted_noise(seed: int, name: str, step: int, size: int) -> np.ndarray:
    """Return the noise of a parameter's elements: Philox4x32-10, then Box-Muller in float32."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    index = np.arange(-(-size // 4), dtype=np.uint64)
    word = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c = [index & word, index >> shift]
    c += [np.full_like(index, (step >> s) & 0xFFFFFFFF) for s in (0, 32)]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        k0, k1 = (np.uint64(each) for each in key)
        c = [(p1 >> shift) ^ c[1] ^ k0, p1 & word, (p0 >> shift) ^ c[3] ^ k1, p0 & word]
        key = [(k + w) % 2**32 for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    k = [(each >> np.uint64(8)).astype(np.int64) for each in c]
    normals = []
    for radius, angle in ((k[0], k[1]), (k[2], k[3])):
        r = np.sqrt(_F(-2) * _log((radius + 1).astype(_F) * _F(2**-24)))
        quarter = (angle + 2**21) >> 22
        x = (angle - (quarter << 22)).astype(_F) * _F(2**-22) * _F(1.5707963)
        z = x * x
        s = (
            (_F(-1.9515295891e-4) * z + _F(8.3321608736e-3)) * z + _F(-1.6666654611e-1)
        ) * z * x + x
        co = (_F(2.443315711809948e-5) * z + _F(-1.388731625493765e-3)) * z + _F(
            4.166664568298827e-2
        )
        co = co * z * z - z * _F(0.5) + _F(1)
        q = quarter % 4
        normals.append(r * np.choose(q, [co, -s, -co, s]))
        normals.append(r * np.choose(q, [s, co, -s, -co]))
    return np.stack(normals, 1).reshape(-1)[:size]


def _log(u: np.ndarray) -> np.ndarray:
    m, e = np.frexp(u)
    low = m < _F(0.70710678)
    x = np.where(low, m * _F(2), m) - _F(1)
    e = e.astype(_F) - low.astype(_F)
    y = _F(7.0376836292e-2)
    for c in (-1.151461031e-1, 1.167699874e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        y = y * x + _F(c)
    y = y * x * (x * x) + e * _F(-2.12194440e-4) - x * x * _F(0.5)
    return x + y + e * _F(0.693359375)


class PlainMeZO:
    """Perturbs from a pristine copy, runs both passes one after the other, and updates at once."""

    def __init__(self, model: nn.Module, epsilon: float, momentum: float = 0.0, seed: int = 0):
        self.model, self.epsilon, self.momentum, self.seed = model, epsilon, momentum, seed
        self.num_steps, self.state = 0, {}

    def noise(self, name: str) -> torch.Tensor:
        size = self.model.get_parameter(name).numel()
        return torch.from_numpy(counted_noise(self.seed, name, self.num_steps, size))

    def read(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that passes perturb."""
        return weight

    @torch.no_grad()
    def step(self, losses: Callable[[nn.Module], list], learning_rate: float) -> float:
        """Make a step over the micro-batches whose losses *losses* returns."""
        weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        kept = {n: p.detach().clone() for n, p in weights.items()}
        z = {n: self.noise(n).view(p.shape) for n, p in weights.items()}
        start, sums = torch.get_rng_state(), []
        for sign in (-1, 1):  # the generators are left where the first pass leaves them
            torch.set_rng_state(start)
            for n, p in weights.items():
                p.data = (self.read(n, kept[n]).float() + z[n] * (sign * self.epsilon)).to(p.dtype)
            sums.append(sum(float(each) for each in losses(self.model)) / len(losses.batches))
        for n, p in weights.items():
            p.data = kept[n]
        gradient = (sums[1] - sums[0]) / (2 * self.epsilon)
        for n, p in weights.items():
            if self.momentum:
                before = self.state.get(n, torch.zeros_like(z[n]))
                self.state[n] = before * self.momentum + z[n] * gradient
                p.copy_((p.float() - self.state[n] * learning_rate).to(p.dtype))
            else:
                p.copy_((p.float() - z[n] * (learning_rate * gradient)).to(p.dtype))
        self.num_steps += 1
        return gradient


class PlainPackedMeZO(PlainMeZO):
    """MeZO whose noise is rounded, and whose passes compute with rounded matrices of layers."""

    def noise(self, name: str) -> torch.Tensor:
        z = super().noise(name)
        return torch.from_numpy(np.rint(z.numpy() * _F(16)) / _F(16))

    def read(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        is_of_layer = any(part.isdigit() for part in name.split("."))
        if weight.ndim < 2 or not is_of_layer:
            return weight
        rows = weight.float().numpy().reshape(-1, weight.shape[-1])
        largest = np.maximum(np.abs(rows).max(1, keepdims=True), _F(2.0**-93))
        scale = largest * (_F(1) / _F(127))
        found = torch.from_numpy(np.rint(rows / scale) * scale)
        return found.view(weight.shape).to(weight.dtype)
