"""Ctrl-C at any line of the package: nothing of it is left, and training goes on with right numbers.

See [Note: Interrupts] in ``hf_pyao/engine/torch_hooks/torch_stacks.py``.
"""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

from hf_pyao import PyAOConfig, attach
from hf_pyao.attachment import offloader_of
from hf_pyao.engine.codecs.narrow import NarrowCodec
from hf_pyao.engine.stores import HostPool
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, autocasting, gradients_of
from tests.helpers.interrupts import Interrupter, Line, destructors_watched
from tests.helpers.simulation.transport import SimulatedTransport

POINTWISE = replace(EVERY_LAYER, recompute_modules=("pointwise",), window=2**20)

CASES: dict[str, tuple[PyAOConfig, dict[str, Any]]] = {
    "bytes": (replace(EVERY_LAYER, window=2048), {}),
    "layer": (EVERY_LAYER, {}),
    "codec": (replace(EVERY_LAYER, codec=NarrowCodec()), {}),
    "recompute": (POINTWISE, {}),
    "checkpointing": (EVERY_LAYER, {"is_checkpointed": True}),
    "recompute and checkpointing": (POINTWISE, {"is_checkpointed": True}),
    "autocast": (POINTWISE, {"autocast": torch.bfloat16}),
    "segments": (
        replace(EVERY_LAYER, checkpoint_every=2, save_attention=True),
        {"autocast": torch.bfloat16},
    ),
    "nested segments": (
        replace(EVERY_LAYER, checkpoint_every=2, checkpoint_nested=True, save_attention=True),
        {},
    ),
}


def normed_gelu(layer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.layer_norm(x, x.shape[-1:])
    hidden = nn.functional.dropout(nn.functional.gelu(layer.inner(hidden)), 0.2)
    return x + hidden @ layer.weight


class Case:
    """A tiny model, how it is attached, and what its gradients are."""

    def __init__(
        self,
        config: PyAOConfig,
        *,
        is_checkpointed: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.autocast = autocast
        self.is_checkpointed = is_checkpointed
        self.pool = HostPool(2**20, pin=False)
        self.input = torch.randn(4, 8)
        self.expected = self.step(self.make_model())
        with attach(self.make_model(), config, host_pool=self.pool):
            pass  # what is imported late is imported now

    def make_model(self) -> Stack:
        model = Stack(normed_gelu, normed_gelu, size=8)
        for layer in model.layers:
            layer.inner = nn.Linear(8, 8)
            if self.is_checkpointed:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = functools.partial(
                    checkpoint, use_reentrant=False
                )
        with torch.no_grad():
            for seed, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * seed)
        return model.train()

    def step(self, model: Stack) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        with autocasting(self.autocast):
            loss = model(self.input).float().square().sum()
        loss.backward()
        return gradients_of(model)

    def run(self, model: Stack, engines: list[Any]) -> None:
        with attach(model, self.config, host_pool=self.pool) as offloader:
            engines.append(offloader.engine)
            self.step(model)

    def what_is_left(self, model: Stack, engines: list[Any]) -> list[str]:
        """Say what of an attachment is left once it has ended."""
        return what_is_left(model, self.pool, engines)


def what_is_left(model: Stack, pool: HostPool, engines: list[Any]) -> list[str]:
    """Say what of ours is still on *model*, on this thread, in the pool, or locked."""
    left = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        left.append("saved-tensor hooks")
    if _python_dispatch._get_current_dispatch_mode() is not None:
        left.append("a dispatch mode")
    if not torch.is_grad_enabled():
        left.append("gradients off")
    if _python_dispatch.is_in_torch_dispatch_mode():
        left.append("torch's note of a dispatch mode")
    kinds = [name for name in vars(nn.Module()) if "hook" in name]
    for path, module in model.named_modules():
        left += [f"{path}.{kind}" for kind in kinds if getattr(module, kind)]
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and getattr(function, "func", None) is not checkpoint:
            left.append(f"{path}'s checkpointing function")
        if "forward" in vars(module):
            left.append(f"{path}'s forward")
    locks = [pool._lock]
    for engine in engines:
        locks += [engine.unpacker._lock, engine.link._lock]
    if not all(is_free(lock) for lock in locks):
        left.append("a lock")
    elif pool.settle():
        left.append(f"{pool.used_bytes} bytes of host buffers")
    for engine in engines:
        if engine.link.waiting_bytes or engine.mover.ahead_bytes:
            left.append("bytes in flight")
    return left


def is_free(lock: Any) -> bool:
    """Say whether another thread gets *lock*."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def interrupt(case: Case, at: int) -> None:
    """Interrupt a step of *case* at its line number *at*; check what comes after."""
    model = case.make_model()
    case.pool = HostPool(2**20, pin=False)  # that another one has grown would change the lines
    engines: list[Any] = []
    with destructors_watched() as unraisable:
        with Interrupter(at) as interrupter:
            try:
                case.run(model, engines)
            except KeyboardInterrupt:
                pass
        assert interrupter.has_raised
        offloader = offloader_of(model)
        if offloader is not None:
            offloader.detach()  # the interrupt came at the first line of __enter__ or __exit__
        gc.collect()
        left = case.what_is_left(model, engines)
        assert not left, f"left: {left}"
        assert_same_tensors(case.step(model), case.expected, "detached")
        engines.clear()
        case.run(model, engines)
        assert_same_tensors(gradients_of(model), case.expected, "attached again")
        left = case.what_is_left(model, engines)
        assert not left, f"left after the next step: {left}"
    assert not unraisable, f"in a destructor: {unraisable}"


def lines_of(case: Case) -> list[Line]:
    """Return the lines of the package that a step of *case* runs, in their order."""
    lines: list[Line] = []
    case.pool = HostPool(2**20, pin=False)
    with Interrupter(note=lines.append):
        case.run(case.make_model(), [])
    return lines


def failures_at(
    case: Case,
    numbers: Iterable[int],
    lines: list[Line],
    check: Callable[[Any, int], None] = interrupt,
) -> list[str]:
    failed = []
    for at in numbers:
        try:
            check(case, at)
        except BaseException as error:
            failed.append(
                "{}:{} {}: ".format(*lines[at]) + f"{type(error).__name__}: {error}"[:300]
            )
            clear(case)
            torch.set_grad_enabled(True)
    return failed


def clear(case: Case) -> None:
    """Take down what a failed test left, for the next one."""
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while _python_dispatch._get_current_dispatch_mode() is not None:
        _python_dispatch._pop_mode()
    _python_dispatch._is_in_torch_dispatch_mode = False
    _python_dispatch._is_in_non_infra_torch_dispatch_mode = False


@pytest.fixture(autouse=True)
def _small(small_heap: None) -> None:
    gc.collect()


def first_and_last(lines: list[Line], known: set[Line]) -> set[int]:
    """Return when each line runs first and last, for those that are not *known*."""
    first, last = {}, {}
    for number, line in enumerate(lines):
        if line not in known:
            first.setdefault(line, number)
            last[line] = number
    return {*first.values(), *last.values()}


@pytest.mark.parametrize("name", ["recompute and checkpointing", "bytes"])
@pytest.mark.sampled(every=1000)
def test_an_interrupt_at_some_lines(name: str) -> None:
    config, options = CASES[name]
    case = Case(config, **options)
    lines = lines_of(case)
    numbers = random.Random(0).sample(range(len(lines)), 40)
    assert failures_at(case, numbers, lines) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_every_line(name: str) -> None:
    config, options = CASES[name]
    case = Case(config, **options)
    lines = lines_of(case)
    known = set() if name == "bytes" else set(lines_of(Case(*CASES["bytes"][:1])))
    numbers = first_and_last(lines, known)
    assert len(numbers) > 20
    numbers |= set(random.Random(1).sample(range(len(lines)), 150))
    assert failures_at(case, sorted(numbers), lines) == []


# ---- while others' hooks are lifted off ----------------------------------------------------------


@pytest.mark.parametrize("direction", ["offload", "reload"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_as_a_late_copy_was_queued(direction: str, at: int) -> None:
    """No one has its ticket: its memory must not be another tensor's before it has run."""
    case = Case(EVERY_LAYER)
    for seed in range(3):
        transport = SimulatedTransport(seed)
        queue, tickets = getattr(transport, direction), []

        def interrupted(*args: Any, _queue: Any = queue, _of: Any = tickets, **kwargs: Any) -> Any:
            _of.append(_queue(*args, **kwargs))
            if len(_of) == at:
                raise KeyboardInterrupt
            return _of[-1]

        setattr(transport, direction, interrupted)
        model = case.make_model()
        with attach(model, case.config, transport=transport):
            with pytest.raises(KeyboardInterrupt):
                case.step(model)
            assert_same_tensors(case.step(model), case.expected, "after the interrupt")
        transport.finish()
        assert not transport.violations


def theirs(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def leaves_hooks_on(layer: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        torch._C._autograd._push_saved_tensors_default_hooks(theirs, theirs)
    raise ValueError("boom")


def test_an_interrupt_while_the_hooks_of_others_are_off() -> None:
    """As where a checkpoint's forward has failed: theirs are above ours, and stay on."""

    def step(model: Stack, at: int | None, lines: list[Line]) -> None:
        with Interrupter(at, lines.append):
            try:
                model(torch.randn(4, 4))
            except (ValueError, KeyboardInterrupt):
                pass

    model = Stack(leaves_hooks_on)
    for _ in range(2):  # the first time other lines run
        lines: list[Line] = []
        with attach(model, EVERY_LAYER):
            step(model, None, lines)
        assert pop_theirs() == [2]
    left = []
    names = ("pop_hooks", "take_out", "_put_back", "<lambda>")
    last = max(n for n, line in enumerate(lines) if line[2] == "push_hooks")
    numbers = [n for n, line in enumerate(lines) if n > last and line[2] in names]
    assert len(numbers) > 10
    for at in numbers:
        with attach(model, EVERY_LAYER):
            step(model, at, [])
        left += pop_theirs()
    assert left == [2] * len(numbers)


def pop_theirs() -> list[int]:
    """Take the hooks of others down; return how many they were. There must be none of ours."""
    count = 0
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        assert top[0] is theirs
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return [count]


# ---- what an interrupt in a script of one's own leaves --------------------------------------------


def test_a_new_model_after_an_interrupt_in_a_forward() -> None:
    """As in a notebook: the cell is interrupted inside a layer and run again."""

    def interrupted(layer: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    old = Stack(normed_gelu, interrupted, size=8)
    old.layers[0].inner = nn.Linear(8, 8)
    first = attach(old, POINTWISE)
    with pytest.raises(KeyboardInterrupt):
        old(torch.randn(4, 8))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    case = Case(POINTWISE)
    engines: list[Any] = []
    model = case.make_model()
    case.run(model, engines)
    assert_same_tensors(gradients_of(model), case.expected, "the new model")
    assert what_is_left(model, case.pool, engines) == []
    old.layers[1].function = normed_gelu
    old.layers[1].inner = nn.Linear(8, 8)
    old(torch.randn(4, 8)).sum().backward()
    assert first.metrics()["recomputed_bytes"] > 0
    first.detach()


def test_a_detach_that_is_interrupted_twice_is_finished_by_whoever_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(EVERY_LAYER)
    for finish in (
        lambda model, offloader: offloader.detach(),
        lambda model, offloader: attach(model, POINTWISE).detach(),
        lambda model, offloader: model(case.input),
    ):
        model = case.make_model()
        offloader = attach(model, EVERY_LAYER)
        with monkeypatch.context() as patch:

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr("hf_pyao.engine.runtime.lifecycle.take_off", interrupted)
            with pytest.raises(KeyboardInterrupt):
                offloader.detach()
        assert not offloader.is_attached
        finish(model, offloader)
        assert what_is_left(model, case.pool, [offloader.engine]) == []
        assert_same_tensors(case.step(model), case.expected, "afterwards")
