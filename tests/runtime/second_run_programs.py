"""Random programs whose layers keep state, draw numbers, and run under modes and hooks of others."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pyao import OutOfDeviceMemoryError, PyAOConfig, attach
from tests.helpers import EVERY_LAYER, FunctionLayer, Stack

SIZE = 6
Step = Callable[[Any, torch.Tensor], torch.Tensor]


class State:
    """A user's own object, with attributes."""

    def __init__(self) -> None:
        self.count = 0


class Fault:
    """Fails once, at a chosen call; what it counts is a class attribute, out of an inventory's way."""

    at = -1
    calls = 0

    @classmethod
    def check(cls) -> None:
        cls.calls += 1
        if cls.calls == cls.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class FaultNode(torch.autograd.Function):
    """May fail in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Fault.check()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Fault.check()
        return grad


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


def draws(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(nn.functional.dropout(x, 0.3) * (1 + random.random()))


def draws_of_own(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * torch.rand(x.shape, generator=layer.generator) * layer.random.random())


def changes_its_input(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x.add_(0.1).clone())


def runs_a_mode(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with SineForTanh():
        return torch.tanh(x * 1.5)


def plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ layer.weight)


STEPS: tuple[Step, ...] = (
    *(counts, counts_in_dict, counts_in_object, counts_in_array, remembers, remembers_tensors),
    *(deletes, fills_none, creates_buffer, writes_in_place, draws, draws_of_own),
    *(changes_its_input, runs_a_mode, plain, plain),
)


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


AROUND: tuple[Callable[[], contextlib.AbstractContextManager[Any]], ...] = (
    *(SineForTanh, SineForCosine, hook_on_all, settings),
    lambda: torch.autocast("cpu", torch.bfloat16),
    *(contextlib.nullcontext,) * 4,
)

CONFIGS: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 1},
    {"checkpoint_every": 2},
    {"checkpoint_every": 3, "checkpoint_nested": True},
    {"recompute_modules": ("*", ".")},
    {"recompute_modules": ("pointwise",)},
    {},
)


class Program:
    """A model, and how it is trained; the same for the same *seed*."""

    def __init__(self, seed: int) -> None:
        chooser = random.Random(seed)
        self.seed = seed
        self._layers = [
            [chooser.choice(STEPS) for _ in range(chooser.randint(1, 3))]
            for _ in range(chooser.randint(2, 4))
        ]
        self._around = chooser.choice(AROUND)
        self._is_backward_inside = chooser.random() < 0.5
        self._hooks = chooser.random() < 0.4
        self._fault_at = chooser.choice([-1, -1, *range(3, 40)])
        self.config = PyAOConfig.from_dict(
            {**EVERY_LAYER.to_dict(), **chooser.choice(CONFIGS), "verify_recompute": "off"}
        )

    def model(self) -> Stack:
        model = Stack(*[self._function(steps) for steps in self._layers], size=SIZE)
        for number, layer in enumerate(model.layers):
            layer.numbers, layer.history, layer.state = {}, deque(maxlen=4), State()
            layer.array = numpy.zeros(2)
            layer.register_buffer("filled", None)
            layer.register_buffer("table", torch.ones(2, SIZE))
            layer.generator = torch.Generator().manual_seed(number)
            layer.random = random.Random(number)
            if self._hooks:
                layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
                layer.register_forward_hook(lambda m, args, out: out * m.table.mean())
        return model

    def _function(self, steps: list[Step]) -> Step:
        def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
            x = FaultNode.apply(x @ layer.weight)
            for step in steps:
                x = step(layer, x)
            return FaultNode.apply(x)

        return run

    def train(self, model: Stack, run: Callable[[Callable[[], None]], Any]) -> dict[str, Any]:
        """Return gradients, state and losses of three micro-batches, the last two accumulated."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        seen: dict[str, Any] = {}
        for number in range(3):
            x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))

            def micro_batch(x: torch.Tensor = x, number: int = number) -> None:
                with self._around():
                    loss = model(x.clone()).float().square().sum()
                    if self._is_backward_inside:
                        loss.backward()
                if not self._is_backward_inside:
                    loss.backward()
                seen[f"loss {number}"] = loss.detach()

            if number == 1:
                model.zero_grad()
            run(micro_batch)
        seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        seen |= {f"buffer {n}": b for n, b in model.named_buffers()}
        seen["drawn"] = torch.rand(()) + random.random()
        for number, layer in enumerate(model.layers):
            held = (getattr(layer, "count", 0), layer.numbers, list(layer.history))
            seen[f"state {number}"] = (*held, layer.state.count, layer.array.tolist())
        return seen

    def differences(self) -> list[str] | str:
        """Return what differs from a run that never saw the package, or why nothing can differ."""
        Fault.at = -1
        try:
            expected = self.train(self.model(), lambda micro_batch: micro_batch())
        except RuntimeError:  # a tensor that autograd needs was changed in place
            return "invalid"
        model = self.model()
        Fault.at, Fault.calls = self._fault_at, 0
        try:
            with attach(model, self.config) as offloader:
                found = self.train(model, offloader.run_micro_batch)
        except OutOfDeviceMemoryError:
            return "refused"
        finally:
            Fault.at = -1
        return [name for name, value in expected.items() if not same(value, found.get(name))]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right)
