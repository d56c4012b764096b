"""The arithmetic of zeroth order: perturbed weights, and the update by a projected gradient.

Source: MeZO ("Fine-Tuning Language Models with Just Forward Passes", Malladi et al., 2023,
algorithm 1), with a pristine copy of the weight in place of adding and taking away epsilon: in 16
bits that would not restore the weight. The deferred update is that of ZO2 (arXiv 2503.12668,
section 5).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_pyao.engine.zeroth_order.noise import NoiseKey, noise
from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.settings.removed import refuse_removed, refuses_removed

CHUNK_ELEMENTS = 1 << 20
"""Elements whose noise is drawn at a time: it bounds the memory that this takes."""

Draw = Callable[[NoiseKey, int, int, int, torch.device], torch.Tensor]
"""Gives noise as :func:`~hf_pyao.engine.zeroth_order.noise.noise` does."""


@refuses_removed
@dataclass(frozen=True, kw_only=True)
class ZerothOrderSettings:
    """What zeroth order does with the weights.

    Raises:
        ConfigError: a value is out of range.
    """

    epsilon: float = 1e-3
    """Scale of the perturbation."""
    momentum: float = 0.0
    """Factor of the last step's direction; 0: plain MeZO-SGD, which has no state."""
    seed: int = 0
    """Of the noise."""
    transfer_dtype: str | None = None
    """``"int8"``: what matrices of layers and noise are on their way between host and device; the
    weights on the host keep their dtype. None: weights travel as they are."""

    def __post_init__(self) -> None:
        refuse_removed("transfer_dtype", "transfer_dtype", self.transfer_dtype)
        if self.transfer_dtype not in (None, "int8"):
            raise unknown_name("transfer_dtype", self.transfer_dtype, ["int8"])
        for name, allows, expected in (
            ("epsilon", lambda value: math.isfinite(value) and value > 0, "a number above 0"),
            ("momentum", lambda value: 0 <= value < 1, "0 <= momentum < 1"),
            ("seed", lambda value: isinstance(value, numbers.Integral), "a whole number"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not (is_number and allows(value)):
                raise ConfigError(f"{name} is {value!r}; expected {expected}.", key="setting-value")


@dataclass(frozen=True)
class PastStep:
    """A step whose losses are known: all that the update of a weight needs, beside its noise."""

    step: int
    learning_rate: float
    gradient: float
    """The projected gradient: (loss at +epsilon - loss at -epsilon) / (2 epsilon)."""


def perturbed(
    weight: torch.Tensor,
    key: NoiseKey,
    step: int,
    scale: float,
    *,
    first_element: int = 0,
    draw: Draw = noise,
) -> torch.Tensor:
    """Return ``weight + scale * z`` in the weight's dtype; *weight* keeps its bits.

    Sum and product are rounded to float32 one by one (float64 for float64 weights), and the sum
    then to the weight's dtype.

    Args:
        weight: any dense tensor of floating point.
        key: of the parameter's noise.
        step: number of the step.
        scale: epsilon, with the pass's sign.
        first_element: the parameter's element that *weight* begins with.
        draw: gives the noise.

    Returns:
        A new contiguous tensor.
    """
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    source = weight.contiguous()
    for first, end in chunks(weight.numel()):
        z = draw(key, step, first_element + first, first_element + end, weight.device).mul_(scale)
        out.view(-1)[first:end] = source.view(-1)[first:end].to(_wide(weight.dtype)) + z
    return out


def update(
    weight: torch.Tensor,
    key: NoiseKey,
    past: PastStep,
    *,
    momentum: float = 0.0,
    state: torch.Tensor | None = None,
    draw: Draw = noise,
) -> None:
    """Change *weight* in place by the update of *past*.

    ``weight - (learning_rate * gradient) * z``; with momentum ``state = momentum * state +
    gradient * z`` and ``weight - learning_rate * state``.

    Args:
        weight: any dense tensor of floating point.
        key: of the parameter's noise.
        past: the step.
        momentum: factor of *state*.
        state: float32, contiguous, of the weight's number of elements, on its device; changed in
            place. None: no momentum.
        draw: gives the noise.
    """
    target = weight.contiguous()
    for first, end in chunks(weight.numel()):
        z = draw(key, past.step, first, end, weight.device)
        if state is None:
            change = z.mul_(past.learning_rate * past.gradient)
        else:
            part = state[first:end]
            part.mul_(momentum).add_(z.mul_(past.gradient))
            change = part * past.learning_rate
        values = target.view(-1)[first:end]
        values.copy_(values.to(_wide(values.dtype)) - change)
    if target is not weight:
        weight.copy_(target)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield first element and the one behind the last of the parts that are drawn at a time."""
    for first in range(0, num_elements, CHUNK_ELEMENTS):
        yield first, min(first + CHUNK_ELEMENTS, num_elements)
