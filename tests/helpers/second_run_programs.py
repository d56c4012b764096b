"""Random programs whose layers keep state, draw numbers, and run under modes and hooks of others.

Each is trained twice: by plain torch, and with hf_pyao. Where MLPs run in tiles, numbers are float64
and compared with a bound, since tiles add in another order; else they are compared by bits.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_pyao import OutOfDeviceMemoryError, PyAOConfig, attach
from hf_pyao.errors import PyAOError
from tests.engine.runtime.program_steps import (
    AROUND,
    AROUND_OF_THREAD,
    MEDDLING,
    MEDDLING_OF_THREAD,
    OF_ONE_THREAD,
    SIZE,
    STATELESS,
    STEPS,
    FaultNode,
    SkipError,
    Step,
    clamp_gradient,
    draws_noted,
    furnish,
    here,
    is_first_run,
    nothing,
    state_of,
)
from tests.helpers import EVERY_LAYER, Stack

NUM_ROWS = 5
TOLERANCE = 1e-8
"""Of float64 where additions come in another order, relative to a tensor's norm."""

CONFIGS: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 1},
    {"checkpoint_every": 2},
    {"checkpoint_every": 3, "checkpoint_nested": True},
    {"recompute_modules": ("*", ".")},
    {"recompute_modules": ("pointwise",)},
    {"mlp_tiles": 2},
    {"mlp_tiles": 3, "checkpoint_every": 1},
    {"mlp_tiles": 2, "checkpoint_every": 3, "checkpoint_nested": True},
    {},
)

Run = Callable[[Callable[[], None]], Any]


class Program:
    """A model, and how it is trained; the same for the same *seed*.

    Args:
        seed: decides on everything.
        settings: of hf_pyao, in place of those that the seed would choose.
        thread: ``"replica"``: it is one of two that run at once; ``"shared"``: its model is trained
            by two threads at once; empty: it runs alone.
        has_faults: whether memory may run out in it.
    """

    def __init__(
        self,
        seed: int,
        *,
        settings: dict[str, Any] | None = None,
        thread: str = "",
        has_faults: bool = True,
    ) -> None:
        chooser = random.Random(seed)
        self.seed = seed
        self.thread = thread
        steps = (*STATELESS, draws_noted) if thread == "shared" else STEPS
        steps = (*OF_ONE_THREAD, draws_noted, draws_noted) if thread == "replica" else steps
        self.layers = [
            [chooser.choice(steps) for _ in range(chooser.randint(1, 3))]
            for _ in range(chooser.randint(2, 4))
        ]
        self.around = chooser.choice(AROUND_OF_THREAD if thread else AROUND)
        self.meddling = chooser.choice(MEDDLING_OF_THREAD if thread else MEDDLING)
        if thread == "shared":
            self.meddling = nothing
        self.is_backward_inside = chooser.random() < 0.5
        self.order = chooser.choice(["each", "each", "each", "both", "retained"])
        self.hooks = chooser.random() < 0.3
        self.backward_hooks = chooser.random() < 0.15
        self.weight_hooks = chooser.random() < 0.1
        self.fault_at = chooser.choice([-1, -1, *range(3, 40)]) if has_faults else -1
        self.skips = (
            (chooser.randrange(3), chooser.randrange(2)) if chooser.random() < 0.05 else None
        )
        chosen = chooser.choice(CONFIGS)
        self.settings = {"verify_recompute": "always", **(chosen if settings is None else settings)}
        self.config = PyAOConfig.from_dict({**EVERY_LAYER.to_dict(), **self.settings})
        self.dtype = torch.float64 if "mlp_tiles" in self.settings else torch.float32

    def model(self) -> Stack:
        """Return the model, the same each time."""
        model = Stack(*[self._function(n, steps) for n, steps in enumerate(self.layers)], size=SIZE)
        for number, layer in enumerate(model.layers):
            furnish(layer, number)
            if self.hooks:
                layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
                layer.register_forward_hook(lambda m, args, out: out * m.table.mean())
            if self.backward_hooks and number:
                layer.register_full_backward_hook(lambda m, given, _: (given[0] * 0.9,))
            if self.weight_hooks:
                layer.weight.register_post_accumulate_grad_hook(clamp_gradient)
        return model.to(self.dtype)

    def _function(self, number: int, steps: list[Step]) -> Step:
        def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
            if self.skips == (here.micro_batch, number) and is_first_run():
                raise SkipError
            x = FaultNode.apply(x @ layer.weight)
            for step in steps:
                x = step(layer, x)
            return FaultNode.apply(x)

        return run

    # ---- one thread ----------------------------------------------------------------------------

    def train(self, model: Stack, run: Run) -> dict[str, Any]:
        """Return gradients, state and losses of three micro-batches, the last two accumulated."""
        if not self.thread:
            torch.manual_seed(self.seed)
            random.seed(self.seed)
        seen: dict[str, Any] = {}
        for number in range(3):
            num_drawn = len(here.drawn)
            here.micro_batch = number

            def micro_batch(number: int = number, num_drawn: int = num_drawn) -> None:
                del here.drawn[num_drawn:]
                seen[f"loss {number}"] = self._micro_batch(model, number)

            if number == 1:
                model.zero_grad()
            try:
                run(micro_batch)
            except SkipError:
                model.train()
        seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        seen |= {f"buffer {n}": b for n, b in model.named_buffers()}
        if not self.thread:
            seen["drawn"] = torch.rand(()) + random.random()
        for number, layer in enumerate(model.layers):
            seen |= {f"{name} of layer {number}": v for name, v in state_of(layer).items()}
        return seen

    def _inputs(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(NUM_ROWS, SIZE, generator=generator).to(self.dtype)

    def _micro_batch(self, model: Stack, number: int) -> torch.Tensor:
        x = self._inputs(number)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x.clone()).to(self.dtype).square().sum()

        def backward(losses: list[torch.Tensor]) -> None:
            with self.meddling(model):
                for loss in losses:
                    if self.order == "retained":
                        loss.backward(retain_graph=True)
                    loss.backward()

        with self.around():
            losses = [loss_of(x)]
            if self.order == "both":
                losses.append(loss_of(x + 1))
            if self.is_backward_inside:
                backward(losses)
        if not self.is_backward_inside:
            backward(losses)
        return torch.stack(losses).detach()

    def expected(self, given: list[Any] | None = None) -> dict[str, Any] | None:
        """Return what plain torch computes; None if the program is not valid there."""
        here.begin(given=given)
        try:
            return self.train(self.model(), lambda micro_batch: micro_batch())
        except RuntimeError:  # a tensor that autograd needs was changed in place
            return None

    def found(self, model: Stack) -> tuple[dict[str, Any], list[Any]]:
        """Return what is computed with hf_pyao, and what was drawn."""
        here.begin(self.fault_at)
        try:
            with attach(model, self.config) as offloader:
                return self.train(model, offloader.run_micro_batch), here.drawn
        finally:
            here.fault_at = -1

    def differences(self) -> list[str] | str:
        """Return what differs from plain torch; ``"invalid"`` or ``"refused"`` if nothing can."""
        expected = self.expected()
        if expected is None:
            return "invalid"
        try:
            found, _ = self.found(self.model())
        except PyAOError as error:
            return refusal(error)
        return self.compared(expected, found)

    def compared(self, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
        """Return the names of what differs."""
        tolerance = TOLERANCE if self.dtype is torch.float64 else 0.0
        return [n for n, value in expected.items() if not same(value, found.get(n), tolerance)]

    # ---- two threads that train one model ------------------------------------------------------

    def gradients(self, model: Stack, thread: int) -> list[torch.Tensor]:
        """Return the gradients of three micro-batches of one of the threads that train *model*."""
        found: list[torch.Tensor] = []
        weights = list(model.parameters())
        for number in range(3):
            with self.around():
                loss = model(self._inputs(3 * thread + number)).to(self.dtype).square().sum()
            found += torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return found


def of_seed(seed: int) -> list[str] | str:
    """Run the program of *seed*: every tenth in two threads; see :meth:`Program.differences`."""
    if seed % 20 == 0:
        return in_two_threads(seed)
    if seed % 20 == 10:
        return in_shared_threads(seed)
    return Program(seed).differences()


def in_two_threads(seed: int) -> list[str] | str:
    """Train two models at once, each in a thread of its own."""
    programs = [
        Program(seed + part * 10**6, thread="replica", has_faults=False) for part in range(2)
    ]
    # Here, and not in the threads: weights are drawn from the default generator.
    models = [program.model() for program in programs]
    found = at_once([partial(p.found, m) for p, m in zip(programs, models, strict=True)])
    differences: list[str] = []
    for program, result in zip(programs, found, strict=True):
        if isinstance(result, BaseException):
            if isinstance(result, RuntimeError) and not isinstance(result, PyAOError):
                return "invalid"  # a tensor that autograd needs was changed in place
            return refusal(result)
        expected = program.expected(result[1])
        if expected is None:
            return "invalid"
        differences += program.compared(expected, result[0])
    return differences


def in_shared_threads(seed: int) -> list[str] | str:
    """Train one model in two threads at once."""
    program = Program(seed, thread="shared", has_faults=False)
    program.skips = None
    model = program.model()

    def work(thread: int) -> tuple[list[torch.Tensor], list[Any]]:
        here.begin()
        return program.gradients(model, thread), here.drawn

    with attach(model, program.config):
        found = at_once([lambda: work(0), lambda: work(1)])
    differences: list[str] = []
    for thread, result in enumerate(found):
        if isinstance(result, BaseException):
            if isinstance(result, RuntimeError) and not isinstance(result, PyAOError):
                return "invalid"
            return refusal(result)
        here.begin(given=result[1])
        try:
            expected = program.gradients(program.model(), thread)
        except RuntimeError:
            return "invalid"
        differences += program.compared(
            {f"gradient {n} of thread {thread}": g for n, g in enumerate(expected)},
            {f"gradient {n} of thread {thread}": g for n, g in enumerate(result[0])},
        )
    return differences


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run *functions* in threads that switch often; return results, or the errors."""
    results: list[Any] = [None] * len(functions)

    def work(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


def refusal(error: BaseException) -> str:
    """Return how an error counts: a refusal by name; others are raised."""
    if isinstance(error, OutOfDeviceMemoryError):
        return "memory"
    if isinstance(error, PyAOError):
        return "refused"
    raise error


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Compare by bits, or numbers with a relative *tolerance*."""
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.shape != right.shape:
            return False
        if torch.equal(left, right) or torch.equal(left.isnan(), right.isnan()) is False:
            return torch.equal(left, right)
        return bool(tolerance) and bool((left - right).norm() <= tolerance * (1e-6 + left.norm()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(
            same(a, b, tolerance) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, float) and tolerance:
        return bool(abs(left - right) <= tolerance * (1 + abs(left)))
    return bool(left == right)
