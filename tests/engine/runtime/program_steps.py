"""What the layers of random programs do: keep state, draw numbers, register hooks, run modes."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.helpers import FunctionLayer

SIZE = 6
Step = Callable[[Any, torch.Tensor], torch.Tensor]


class State:
    """A user's own object, with attributes."""

    def __init__(self) -> None:
        self.count = 0


class Here(threading.local):
    """What the calling thread is at; no inventory reaches it."""

    def __init__(self) -> None:
        self.fault_at = -1
        self.num_calls = 0
        self.drawn: list[Any] = []
        """What :func:`draws_noted` has drawn, in first runs of layers."""
        self.given: Iterator[Any] | None = None
        """What it gets instead of drawing."""
        self.skips: tuple[int, int] | None = None
        """Micro-batch and layer at which a user's own error is raised, in the first run."""
        self.micro_batch = 0

    def begin(self, fault_at: int = -1, given: list[Any] | None = None) -> None:
        """Begin a training."""
        self.fault_at, self.num_calls, self.drawn = fault_at, 0, []
        self.given = None if given is None else iter(given)


here = Here()


class SkipError(Exception):
    """A user's own error, for which a micro-batch is left out."""


class FaultNode(torch.autograd.Function):
    """Fails once, at a chosen call, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        check_fault()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        check_fault()
        return grad


def check_fault() -> None:
    here.num_calls += 1
    if here.num_calls == here.fault_at:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def is_first_run() -> bool:
    return torch._C._current_graph_task_id() == -1


# ---- state ---------------------------------------------------------------------------------------


def counts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.count = getattr(layer, "count", 0) + 1
    return x * torch.tanh(x * layer.count)


def counts_in_dict(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.numbers["n"] = layer.numbers.get("n", 1) + 1
    return torch.sin(x * layer.numbers["n"])


def counts_in_object(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.state.count += 1
    return torch.sin(x + layer.state.count)


def counts_in_array(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.array[0] += 1
    return torch.cos(x * float(layer.array[0]))


def remembers(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.history.append(float(x.detach().mean()))
    return x * torch.sin(x + sum(layer.history))


def remembers_tensors(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.means = (*getattr(layer, "means", ())[-2:], x.detach().mean(0))
    return torch.sin(x + torch.stack(layer.means).sum(0))


def deletes(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(layer, "once"):
        del layer.once
        return torch.tanh(x * 2)
    layer.once = True
    return torch.tanh(x)


def fills_none(layer: Any, x: torch.Tensor) -> torch.Tensor:
    mean = x.detach().mean(0)
    layer.filled = mean if layer.filled is None else 0.5 * layer.filled + mean
    return torch.sin(x * layer.filled)


def creates_buffer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    mean = x.detach().mean(0)
    if "late" not in layer._buffers:
        layer.register_buffer("late", mean)
    else:
        layer.late = 0.5 * layer.late + mean
    return torch.sin(x * layer.late)


def writes_in_place(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = torch.sin(x + layer.table.sum())
    with torch.no_grad():
        layer.table.mul_(0.9).add_(x.detach().mean())
    return result


def changes_its_input(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x.add_(0.1).clone())


# ---- state of real layers ------------------------------------------------------------------------


def norms(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(layer.batch_norm(x))


def projects(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """By a spectral norm, which iterates in each forward."""
    return torch.tanh(layer.spectral(x))


def averages(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = torch.sin(x - layer.average)
    layer.average = 0.9 * layer.average + 0.1 * x.detach().mean(0)
    return result


def counts_in_buffer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.num_steps += 1
    return x * torch.tanh(layer.num_steps.to(x.dtype) / 3)


def routes(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Moves the bias of experts that got few tokens, and counts their tokens."""
    chosen = (x @ layer.weight + layer.bias).argmax(-1)
    num_tokens = torch.bincount(chosen, minlength=SIZE)
    layer.num_tokens += num_tokens
    layer.bias += 0.1 * torch.sign(num_tokens.to(x.dtype).mean() - num_tokens)
    return x * torch.cos(x[:, chosen])[:, :SIZE].mean(-1, keepdim=True)


def keeps_hidden(layer: Any, x: torch.Tensor) -> torch.Tensor:
    before, layer.hidden = getattr(layer, "hidden", None), x.detach().clone()
    return torch.sin(x if before is None else x + before.mean(0))


def leaves_loss(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.loss = x.square().mean()
    return torch.tanh(x)


def drops_depth(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.3 else x + torch.sin(x @ layer.weight)


# ---- random numbers ------------------------------------------------------------------------------


def draws(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(nn.functional.dropout(x, 0.3) * (1 + random.random()))


def draws_noted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As :func:`draws`, where other threads draw too: the reference gets what was drawn."""
    if here.given is not None:
        noise, factor = next(here.given)
    else:
        noise, factor = torch.rand(x.shape, dtype=x.dtype), random.random()
        if is_first_run():
            here.drawn.append((noise, factor))
    return torch.sin(x * noise * (1 + factor))


def draws_of_own(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * torch.rand(x.shape, generator=layer.generator) * layer.random.random())


# ---- modes and other libraries of torch ----------------------------------------------------------


def runs_a_mode(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with SineForTanh():
        return torch.tanh(x * 1.5)


def checkpoints(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: torch.sin(x @ layer.weight), x, use_reentrant=False)


def without_grad(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.sin(x @ layer.weight).square()
    return x * torch.cos(scale + x)


def plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ layer.weight)


# ---- hooks on tensors ----------------------------------------------------------------------------


def hooks_its_tensor(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(x)
    x.register_hook(lambda grad: grad * 0.9)
    return torch.cos(x * x)


def hooks_and_counts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Its hook changes in backward what the forward goes by."""
    x = torch.sin(x + layer.state.count)
    x.register_hook(lambda grad: setattr(layer.state, "count", layer.state.count + 1))
    return torch.tanh(x)


def hooks_a_node(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.cos(x)
    if x.grad_fn is not None:  # None where the layer runs again for its result alone
        x.grad_fn.register_prehook(lambda grads: (grads[0] * 1.1,))
        x.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g * 0.8 for g in grads))
    return torch.sin(x)


def hooks_its_weight_once(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer, "is_hooked"):
        layer.is_hooked = True
        layer.weight.register_hook(lambda grad: grad * 1.5)
    return torch.sin(x @ layer.weight)


def hooks_its_weight_each_time(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes the hook of the call before off."""
    if hasattr(layer, "handle"):
        layer.handle.remove()
    layer.handle = layer.weight.register_hook(lambda grad: grad * 0.5)
    return torch.sin(x @ layer.weight)


def retains(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(x)
    x.retain_grad()
    layer.retained = x
    return x * torch.cos(x)


# ---- an MLP, which may run in tiles --------------------------------------------------------------


class MLP(nn.Module):
    """Goes up and down, by a factor that its layer may change."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.up_proj(x)) * self.factor)


def runs_mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + layer.mlp(x)


def turns_mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + layer.mlp(x)
    layer.mlp.factor = 0.5 * layer.mlp.factor + 0.7
    return x


def hooks_mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    given = torch.sin(x)
    given.register_hook(lambda grad: grad * 0.7)
    result = layer.mlp(given)
    result.register_hook(lambda grad: grad * 1.2)
    return torch.sin(result)


def freezes_mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Trains one of its weights in every other call."""
    weight = layer.mlp.up_proj.weight
    weight.requires_grad_(not weight.requires_grad)
    return torch.sin(layer.mlp(x))


STATELESS: tuple[Step, ...] = (
    *(runs_a_mode, checkpoints, without_grad, plain, hooks_its_tensor, hooks_a_node),
    *(changes_its_input, runs_mlp, hooks_mlp),
)
OF_ONE_THREAD: tuple[Step, ...] = (
    *(counts, counts_in_dict, counts_in_object, counts_in_array, remembers, remembers_tensors),
    *(deletes, fills_none, creates_buffer, writes_in_place, draws_of_own),
    *(hooks_and_counts, hooks_its_weight_once, hooks_its_weight_each_time, retains),
    *(norms, projects, averages, counts_in_buffer, routes, keeps_hidden, leaves_loss),
    *(turns_mlp, freezes_mlp, *STATELESS),
)
STEPS: tuple[Step, ...] = (*OF_ONE_THREAD, draws, draws, drops_depth, plain)


# ---- what is around a micro-batch ----------------------------------------------------------------


class SineForTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class SineForCosine(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        return (aten.sin.default if func is aten.cos.default else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def hook_on_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: 1.25 * out if isinstance(m, FunctionLayer) else None
    )
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def settings() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def autocast_without_cache() -> contextlib.AbstractContextManager[Any]:
    """All threads have one cache of casts: plain torch gives other bits from run to run with it."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


Around = Callable[[], contextlib.AbstractContextManager[Any]]
AROUND_OF_THREAD: tuple[Around, ...] = (
    *(SineForTanh, SineForCosine, autocast_without_cache),
    *(contextlib.nullcontext,) * 4,
)
AROUND: tuple[Around, ...] = (*AROUND_OF_THREAD, hook_on_all, settings, autocast)


# ---- what a script does between a forward and its backward ---------------------------------------

Meddling = Callable[[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def evaluates(model: Any) -> Iterator[None]:
    model.eval()
    yield
    model.train()


@contextlib.contextmanager
def freezes(model: Any) -> Iterator[None]:
    model.layers[0].weight.requires_grad_(False)
    yield
    model.layers[0].weight.requires_grad_(True)


@contextlib.contextmanager
def exchanges(model: Any) -> Iterator[None]:
    layer = model.layers[1]
    own, layer.function = layer.function, lambda layer, x: torch.cos(x @ layer.weight)
    yield
    layer.function = own


@contextlib.contextmanager
def hooks_a_layer(model: Any) -> Iterator[None]:
    handle = model.layers[-1].register_forward_hook(lambda m, args, out: out * 2)
    yield
    handle.remove()


@contextlib.contextmanager
def seeds(model: Any) -> Iterator[None]:
    torch.manual_seed(5)
    random.seed(5)
    yield


@contextlib.contextmanager
def wider(model: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def counts_on(model: Any) -> Iterator[None]:
    for layer in model.layers:
        layer.numbers["n"] = 7
        layer.state = State()
        layer.array += 2
    yield


@contextlib.contextmanager
def writes_table(model: Any) -> Iterator[None]:
    model.layers[0].table.add_(0.1)
    yield


@contextlib.contextmanager
def turns_factor(model: Any) -> Iterator[None]:
    model.layers[0].mlp.factor *= 0.9
    yield


@contextlib.contextmanager
def nothing(model: Any) -> Iterator[None]:
    yield


MEDDLING_OF_THREAD: tuple[Meddling, ...] = (
    *(evaluates, freezes, exchanges, hooks_a_layer, counts_on, writes_table, turns_factor),
    *(nothing,) * 14,
)
MEDDLING: tuple[Meddling, ...] = (*MEDDLING_OF_THREAD, seeds, wider, *(nothing,) * 4)


def clamp_gradient(weight: torch.Tensor) -> None:
    """As a hook that runs behind the sum of a gradient; it returns nothing."""
    if weight.grad is not None:  # None where the weight was frozen after its forward
        weight.grad.clamp_(-3, 3)


def furnish(layer: Any, number: int) -> None:
    """Give *layer* what the steps use."""
    layer.numbers, layer.history, layer.state = {}, deque(maxlen=4), State()
    layer.array = numpy.zeros(2)
    layer.register_buffer("filled", None)
    layer.register_buffer("table", torch.ones(2, SIZE))
    layer.generator = torch.Generator().manual_seed(number)
    layer.random = random.Random(number)
    layer.mlp = MLP()
    layer.batch_norm = nn.BatchNorm1d(SIZE)
    layer.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))
    for name in ("average", "bias", "num_tokens", "num_steps"):
        of_ints = name.startswith("num")
        value = torch.zeros(SIZE, dtype=torch.int64 if of_ints else torch.float32)
        layer.register_buffer(name, value)


def state_of(layer: Any) -> dict[str, Any]:
    """Return what *layer* holds of the steps' state."""
    retained = getattr(layer, "retained", None)
    return {
        "count": getattr(layer, "count", 0),
        "hidden": getattr(layer, "hidden", torch.zeros(())),
        "loss": getattr(layer, "loss", torch.zeros(())).detach(),
        "numbers": dict(layer.numbers),
        "history": list(layer.history),
        "object": layer.state.count,
        "array": layer.array.tolist(),
        "factor": layer.mlp.factor,
        "retained gradient": None if retained is None else retained.grad,
        "trained": [p.requires_grad for p in layer.parameters()],
        "hooks on the weight": len(layer.weight._backward_hooks or ()),
    }
