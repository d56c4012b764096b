"""Kinds of MLPs: how many bytes a token takes in one, measured on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_pyao.engine.rerun.bare_thread import bare_thread
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.model.patching.exchanged_forwards import own_forward
from hf_pyao.model.tiles.mlp_search import FoundMLP, inside
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.text import describe_error
from hf_pyao.training_engines import FSDP1, Feature, whole_shape

_MEASURED_TOKENS = 4096

_MOST_OF_FUSED = 6
"""Tensors of the input's size that forward and backward of one fused kernel take at most: input,
output, their gradients, and a copy or two."""


@dataclass(frozen=True, kw_only=True)
class KnownMLP:
    """An MLP that may run in tiles if its first batch shows that no tokens meet in it."""

    kind: str
    """What it is, equal for equal ones, on all ranks."""
    num_inputs: int
    """Tensors that its method takes."""
    itemsize: int
    """Bytes of an element of its weights."""
    token_bytes: int
    """Bytes that a token takes inside, forward and backward, at the peak."""
    weight_bytes: int
    """Bytes of its weights; where they are sharded, when whole."""
    width: int
    """Features of a token of its input."""

    @property
    def is_wide(self) -> bool:
        """Whether a token takes far more inside than what goes in and comes out of it."""
        return self.token_bytes > _MOST_OF_FUSED * self.width * self.itemsize


def known_mlp(mlp: FoundMLP) -> KnownMLP | str:
    """Return what is known of *mlp*, or why it cannot run in tiles; looked at once for its kind."""
    kind, places = _kind_of(mlp), [(type(each), w) for each in mlp.parts for w in _weights_of(each)]
    key = (kind, *places)
    if key not in _KNOWN:
        _KNOWN[key] = _look_at(mlp, kind)
    return _KNOWN[key]


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


def _look_at(mlp: FoundMLP, kind: str) -> KnownMLP | str:
    width = _width_of(mlp.up, is_norm=mlp.is_norm)
    weights = [weight for part in mlp.parts for weight in part.parameters()]
    if width is None or not weights:
        return "the width of its input is not known"
    first = next((w for w in mlp.up.parameters() if w.is_floating_point()), None)
    dtype = torch.bfloat16 if first is None or first.dtype.itemsize < 2 else first.dtype
    try:
        token_bytes = _token_bytes(mlp, width, dtype, weights[0].device)
    except NotTokenWise as refusal:
        return str(refusal)
    except Exception as error:  # of the module's own code
        if any(map(FSDP1.has, weights)):
            return FSDP1.reason(Feature.MLP_TILES)
        return f"it cannot be run on tensors without values: {describe_error(error)}"
    return KnownMLP(
        kind=kind,
        num_inputs=mlp.num_inputs,
        itemsize=dtype.itemsize,
        width=width,
        token_bytes=token_bytes,
        weight_bytes=sum(
            torch.Size(whole_shape(weight) or weight.shape).numel() * weight.element_size()
            for weight in weights
        ),
    )


class NotTokenWise(Exception):
    """A function may not run on a part of the tokens; the message says why."""


def _token_bytes(mlp: FoundMLP, width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return by how many bytes the peak of forward and backward grows with a token.

    Raises:
        NotTokenWise: what it returns is not one tensor of a row for each token, or it uses weights
            of others, whose gradients would be lost.
    """
    function, peaks = function_of(mlp), []
    for times in (1, 2):
        with faked(mlp.parts) as fake_mode:
            weights = [w for part in mlp.parts for w in part.parameters() if w.requires_grad]
            with fake_mode:
                inputs = [
                    torch.empty(
                        *(1, times * _MEASURED_TOKENS, width),
                        dtype=dtype,
                        device=device,
                        requires_grad=True,
                    )
                    for _ in range(mlp.num_inputs)
                ]
                ledger = MemoryLedger()
                with NotingMode(ledger, fake_mode):
                    output = function(*inputs)
                    _check_output(output, inputs, weights)
                    grad = torch.empty_like(output)
                    torch.autograd.grad(output, [*inputs, *weights], grad, allow_unused=True)
                peaks.append(ledger.peak_bytes)
                del output, grad, inputs
    return -(-(peaks[1] - peaks[0]) // _MEASURED_TOKENS)


def _check_output(output: Any, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    if not isinstance(output, Tensor):
        raise NotTokenWise(f"it returns a {type(output).__name__} and not one tensor")
    if output.shape[:-1] != inputs[0].shape[:-1]:
        raise NotTokenWise("what it returns is not one row for each token")
    known, seen = set(map(id, (*inputs, *weights))), {None}
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise NotTokenWise("it uses a trained weight of another module")
        nodes.extend(before for before, _ in node.next_functions)


@contextmanager
def faked(modules: Sequence[nn.Module]) -> Iterator[FakeTensorMode]:
    """Let *modules* run, as in training, on fake tensors, and put back what they change.

    Yields the mode, which is to be entered. Operations are those of a mode of their own: no other
    one, such as a recording, sees them. Weights that are sharded are whole meanwhile.
    """
    everything = list(dict.fromkeys(m for module in modules for m in module.modules()))
    weights = [p for module in everything for p in module._parameters.values() if p is not None]
    fake = next((weight.fake_mode for weight in weights if isinstance(weight, FakeTensor)), None)
    fake_mode = fake or FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(bare_thread())
        stack.callback(StateOfCall(ModuleState(modules, ""), clones_all=True).undo)
        stack.enter_context(RandomState(()).kept())
        for module in everything:
            vars(module)["training"] = True
            for name, weight in module._parameters.items():
                if weight is not None and (shape := whole_shape(weight)) is not None:
                    with fake_mode:
                        whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
                    whole.requires_grad_(weight.requires_grad)
                    # Sharded parameters are left to the engine that has sharded them.
                    stack.callback(module._parameters.__setitem__, name, weight)
                    module._parameters[name] = whole  # type: ignore[assignment]
        yield fake_mode


def _kind_of(mlp: FoundMLP) -> str:
    """Return what *mlp* computes with, in words that are the same on all ranks."""
    method = mlp.method if mlp.is_spread else getattr(function_of(mlp), "__qualname__", "")
    shapes = [tuple(shape) for part in mlp.parts for _, shape, *_ in _weights_of(part)]
    return repr((method, len(mlp.places), mlp.parts, shapes))


def _weights_of(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, weight in module.named_parameters():
        shape = whole_shape(weight) or weight.shape
        yield name, shape, weight.dtype, weight.requires_grad, weight.device


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

_KNOWN: dict[Any, KnownMLP | str] = {}
"""What is known of MLPs, by their kind, classes and weights."""
