"""Checks before an MLP runs in tiles: whether it may, and how many bytes a token takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_pyao.model.patching.exchanged_forwards import own_forward
from hf_pyao.model.tiles.mlp_search import FoundMLP, inside
from hf_pyao.model.tiles.token_wise import faked, reason_not_token_wise
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.training_engines import whole_shape

_MEASURED_TOKENS = 4096

_MOST_OF_FUSED = 6
"""Tensors of the input's size that forward and backward of one fused kernel take at most: input,
output, their gradients, and a copy or two."""


@dataclass(frozen=True, kw_only=True)
class KnownMLP:
    """An MLP that treats each token by itself."""

    num_inputs: int
    """Tensors that its method takes."""
    leads: frozenset[int]
    """Numbers of dimensions before the last one with which it may be called."""
    itemsize: int
    """Bytes of an element of its weights."""
    token_bytes: int
    """Bytes that a token takes inside, forward and backward, at the peak."""
    weight_bytes: int
    """Bytes of its weights; where they are sharded, when whole."""
    width: int
    """Features of a token of its input."""
    draws: bool = False
    """Whether it draws random numbers."""

    @property
    def is_wide(self) -> bool:
        """Whether a token takes far more inside than what goes in and comes out of it."""
        return self.token_bytes > _MOST_OF_FUSED * self.width * self.itemsize


class Proofs:
    """Proofs of MLPs; those of equal ones are made once."""

    def __init__(self) -> None:
        self._known: dict[Any, KnownMLP | str] = {}

    def of(self, mlp: FoundMLP) -> KnownMLP | str:
        """Return what is known of *mlp*, or why it cannot run in tiles."""
        key = (mlp.method, len(mlp.places), *map(_structure, mlp.parts))
        if key not in self._known:
            self._known[key] = _prove(mlp)
        return self._known[key]


def function_of(mlp: FoundMLP) -> Callable[..., Tensor]:
    """Return what *mlp* computes, without the hooks of its places."""
    if not mlp.is_spread:
        module = inside(mlp.places[0])
        own = own_forward(module) if mlp.method == "forward" else getattr(module, mlp.method)
        written_for = getattr(own, "__qualname__", "").partition(".")[0]
        plain = _WITHOUT_KERNELS.get(written_for)
        return own if plain is None else lambda x: plain(module, x)
    steps = [own_forward(place) for place in mlp.places]

    def run(hidden: Tensor) -> Tensor:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return run


def _prove(mlp: FoundMLP) -> KnownMLP | str:
    width = _width_of(mlp.up, is_norm=mlp.is_norm)
    weights = [weight for part in mlp.parts for weight in part.parameters()]
    if width is None or not weights:
        return "the width of its input is not known"
    first = next((w for w in mlp.up.parameters() if w.is_floating_point()), None)
    dtype = torch.bfloat16 if first is None or first.dtype.itemsize < 2 else first.dtype
    device = weights[0].device
    function, num_inputs = function_of(mlp), mlp.num_inputs
    draws: list[bool] = []
    reasons = {
        num_lead: reason_not_token_wise(
            function,
            mlp.parts,
            widths=[width] * num_inputs,
            dtype=dtype,
            device=device,
            num_lead=num_lead,
            on_draw=lambda: draws.append(True),
        )
        for num_lead in (1, 2)
    }
    leads = frozenset(num_lead for num_lead, reason in reasons.items() if reason is None)
    if not leads:
        return str(reasons[2])
    shape = (_MEASURED_TOKENS, width) if 2 not in leads else (1, _MEASURED_TOKENS, width)
    try:
        token_bytes = _token_bytes(function, mlp.parts, shape, num_inputs, dtype, device)
    except Exception as error:  # of the module's own code
        return f"its memory cannot be measured: {error}"
    return KnownMLP(
        num_inputs=num_inputs,
        leads=leads,
        itemsize=dtype.itemsize,
        width=width,
        draws=bool(draws),
        token_bytes=token_bytes,
        weight_bytes=sum(
            torch.Size(whole_shape(weight) or weight.shape).numel() * weight.element_size()
            for weight in weights
        ),
    )


def _token_bytes(
    function: Callable[..., Tensor],
    parts: Sequence[nn.Module],
    shape: Sequence[int],
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return by how many bytes the peak of forward and backward grows with a token."""
    peaks = []
    for times in (1, 2):
        sizes = (*shape[:-2], times * shape[-2], shape[-1])
        with faked(parts) as fake_mode:
            weights = [w for part in parts for w in part.parameters() if w.requires_grad]
            with fake_mode:
                inputs = [
                    torch.empty(sizes, dtype=dtype, device=device, requires_grad=True)
                    for _ in range(num_inputs)
                ]
                ledger = MemoryLedger()
                with NotingMode(ledger, fake_mode):
                    output = function(*inputs)
                    grad = torch.empty_like(output)
                    torch.autograd.grad(output, [*inputs, *weights], grad, allow_unused=True)
                peaks.append(ledger.peak_bytes)
                del output, grad, inputs
    return -(-(peaks[1] - peaks[0]) // shape[-2])


def _structure(module: nn.Module) -> Any:
    shapes = [
        (name, whole_shape(w) or w.shape, w.dtype, w.requires_grad, w.device)
        for name, w in module.named_parameters()
    ]
    return (type(module), repr(module), tuple(shapes))


def _width_of(up: nn.Module, *, is_norm: bool) -> int | None:
    if is_norm:
        weight = next(up.parameters(), None)
        return None if weight is None else (whole_shape(weight) or weight.shape)[-1]
    for name in ("in_features", "nx", "input_dim"):
        width = getattr(up, name, None)
        if isinstance(width, int):
            return width
    return None


def _swiglu(module: Any, hidden: Tensor) -> Tensor:
    up: Tensor = module.up_proj(hidden)
    down: Tensor = module.down_proj(F.silu(module.gate_proj(hidden)) * up)
    return down


def _geglu(module: Any, hidden: Tensor) -> Tensor:
    gate = F.gelu(module.gate_proj(hidden), approximate="tanh")
    down: Tensor = module.down_proj(gate * module.up_proj(hidden))
    return down


def _packed_swiglu(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
    down: Tensor = module.down_proj(up * F.silu(gate))
    return down


_WITHOUT_KERNELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "LigerSwiGLUMLP": _swiglu,
    "LigerBlockSparseTop2MLP": _swiglu,
    "LigerQwen3MoeSwiGLUMLP": _swiglu,
    "LigerGEGLUMLP": _geglu,
    "LigerPhi3SwiGLUMLP": _packed_swiglu,
}
"""Class whose forward launches kernels of its own, element by element -> what it computes. Tensors
without values stop at such kernels."""
