"""Digests of gradients: equal if and only if all bits are, whatever the order of summation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

_CHUNK = 2**21
"""Elements digested at once: the integers that it needs take a few tens of MiB."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradientDigest:
    """Digests gradients as they are completed, without keeping them.

    Each gradient's bits are read as integers and summed, plain and weighted by position, modulo
    2**64: integer sums do not depend on the order in which a device adds. Zeros of either sign are
    one value.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._squares: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Digest *gradient* (floating, dense) of the parameter called *name*."""
        flat = gradient.detach().reshape(-1)
        sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
        square = torch.zeros((), dtype=torch.float64, device=flat.device)
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK] + 0.0  # -0.0 becomes 0.0
            words = chunk.view(_WORDS[chunk.element_size()]).to(torch.int64)
            places = torch.arange(start, start + words.numel(), device=flat.device)
            sums[0] += words.sum()
            sums[1] += (words * (2 * places + 1)).sum()
            square += chunk.double().square().sum()
        self._sums[name] = sums
        self._squares[name] = square

    def hexdigest(self) -> str:
        """Return 16 hex digits over all gradients, by parameter name."""
        digest = hashlib.sha256()
        for name in sorted(self._sums):
            digest.update(f"{name}:{self._sums[name].tolist()};".encode())
        return digest.hexdigest()[:16]

    def norm(self) -> float:
        """Return the Euclidean norm over all gradients."""
        return math.sqrt(math.fsum(float(square) for square in self._squares.values()))


class GradientSink:
    """What becomes of gradients once they are complete: kept, or dropped; digested when asked.

    Args:
        model: its trainable parameters are watched until :meth:`close`.
        release: drop each gradient as soon as it is complete.
    """

    def __init__(self, model: nn.Module, *, release: bool) -> None:
        self.digest: GradientDigest | None = None
        self._release = release
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def on_complete(parameter: torch.Tensor) -> None:
            if self.digest is not None and parameter.grad is not None:
                self.digest.add(name, parameter.grad)
            if self._release:
                parameter.grad = None

        return on_complete
