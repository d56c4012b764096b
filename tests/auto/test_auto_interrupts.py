"""Ctrl-C at any line while policy auto measures, plans, switches plans, and makes room."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch._guards import active_fake_mode

from hf_pyao import attach
from hf_pyao.attachment import offloader_of
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.recording.held_interrupts import SIGNALS, HeldInterrupts
from hf_pyao.engine.stores import HostPool
from tests.auto.test_auto_odd_loops import (
    AUTO,
    LINK,
    SPEEDS,
    Block,
    Net,
    assert_same,
    batch,
    cap_for,
    make,
    run,
)
from tests.engine.runtime.test_interrupts import what_is_left
from tests.helpers.interrupts import ROOT, Interrupter, Line, destructors_watched
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport

FILES = (
    "auto/deciding",
    "auto/measuring",
    "auto/performer",
    "auto/plans/plan_timing",
    "auto/plans/kept_plans",
    "auto/plans/planning",
    "auto/policy",
    "auto/profiling",
    "auto/recording/forward_watch",
    "auto/recording/model_copy",
    "auto/recording/seen_forward",
    "auto/recording/step_recording",
    "auto/retry/out_of_memory",
    "auto/retry/tightening",
    "auto/view",
)
"""What an interrupt comes into."""

HELD = ("__torch_dispatch__", "_is_real", "_written", "let_in")
"""Functions that torch calls where nothing may be raised: signals are held there."""

PATHS = {f"{ROOT}/{name}.py" for name in (*FILES, "auto/machine/driver")}
assert all(map(os.path.isfile, PATHS))


class AutoInterrupter(Interrupter):
    """Sees those files alone: to trace all others takes minutes."""

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name in HELD:
            return None
        return self._on_event if code.co_filename in PATHS else None


class Training:
    """Micro-batches of two sizes under a limit; the last one runs out of memory once."""

    def __init__(self) -> None:
        cap = cap_for(Net, batch(8), share=0.9)
        self.config = replace(AUTO, profile_steps=1, device_memory_gib=cap)
        self.batches = [batch(2), batch(2), batch(8), batch(8), batch(8)]
        self.expected = run(make(), self.batches)

    def train(self, model: Net, offloader: Offloader) -> list[list[torch.Tensor | None]]:
        found = []
        for number, inputs in enumerate(self.batches):
            tries = []

            def micro_batch(number: int = number, inputs: Any = inputs, tries: Any = tries) -> None:
                tries.append(number)
                loss = model(inputs)
                if number == len(self.batches) - 1 and len(tries) == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
                loss.backward()

            torch.manual_seed(number)
            model.zero_grad()
            link: Any = offloader.transport
            with SimulatedDevice(SPEEDS, link.link, offloader.host_pool):
                offloader.run_micro_batch(micro_batch, writes_only_this_model=True)
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    def whole(self, model: Net, engines: list[Any]) -> list[list[torch.Tensor | None]]:
        pool = HostPool(2**22, pin=False)
        transport = SimulatedTransport(0, link=LINK)
        with attach(model, self.config, host_pool=pool, transport=transport) as offloader:
            engines.append(offloader.engine)
            return self.train(model, offloader)

    def lines(self) -> list[Line]:
        lines: list[Line] = []
        with AutoInterrupter(note=lines.append):
            self.whole(make(), [])
        return lines

    def lines_once_attached(self) -> list[Line]:
        lines: list[Line] = []
        model = make()
        with attach(model, self.config, transport=SimulatedTransport(0, link=LINK)) as offloader:
            with AutoInterrupter(note=lines.append):
                self.train(model, offloader)
        return lines

    def interrupted(self, at: int) -> None:
        """Interrupt a training; nothing may be left, and the next one must be right."""
        model, engines = make(), []
        with destructors_watched() as unraisable:
            with AutoInterrupter(at) as interrupter:
                try:
                    self.whole(model, engines)
                except KeyboardInterrupt:
                    pass
            assert interrupter.has_raised
            offloader = offloader_of(model)
            if offloader is not None:
                offloader.detach()
            gc.collect()
            for engine in engines:
                assert not what_is_left(model, engine.link.tiers.stores[0], engines)
            assert_same(run(model, self.batches), self.expected)
        assert not unraisable

    def goes_on(self, at: int) -> None:
        """Interrupt a micro-batch as in a notebook, and train on with what is attached."""
        model = make()
        transport = SimulatedTransport(0, link=LINK)
        with attach(model, self.config, transport=transport) as offloader:
            with AutoInterrupter(at) as interrupter:
                try:
                    self.train(model, offloader)
                except KeyboardInterrupt:
                    pass
            assert interrupter.has_raised
            # Once: each training runs out of memory, for which there are two tighter ways.
            assert_same(self.train(model, offloader), self.expected)


def numbers_of(lines: Sequence[Line], num_points: int, seed: int = 0) -> list[int]:
    """Return points at which a line runs for the first time, each as likely."""
    first: dict[Line, int] = {}
    for number, line in enumerate(lines):
        first.setdefault(line, number)
    assert len(first) > 300
    found = list(first.values())
    return sorted(random.Random(seed).sample(found, min(num_points, len(found))))


@pytest.fixture(autouse=True)
def _random_numbers_are_ours() -> Any:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.thorough
def test_an_interrupt_leaves_nothing() -> None:
    training = Training()
    assert_same(training.whole(make(), []), training.expected)
    lines = training.lines()
    for at in numbers_of(lines, 60):
        try:
            training.interrupted(at)
        except BaseException as error:
            raise AssertionError("{}:{} {}".format(*lines[at])) from error


@pytest.mark.thorough
def test_training_goes_on_after_an_interrupt() -> None:
    training = Training()
    lines = training.lines_once_attached()
    for at in numbers_of(lines, 20, seed=1):
        try:
            training.goes_on(at)
        except BaseException as error:
            raise AssertionError("{}:{} {}".format(*lines[at])) from error


class Interrupted(Block):
    """Interrupted once, while its copy runs on fake tensors."""

    after: ClassVar[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if active_fake_mode() is not None and not self.after:
            signal.raise_signal(signal.SIGINT)
            self.after.append(True)  # nothing is raised before the next operation
        return super().forward(x)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Have Ctrl-C raise: where the tests run in the background, a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_a_signal_while_it_records_waits_for_the_next_operation() -> None:
    Interrupted.after.clear()
    model = make(lambda: Net(Interrupted))
    expected = run(model, [batch()] * 3)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with attach(model, replace(AUTO, profile_steps=1, device_memory_gib=1e-4)) as offloader:
        run(model, [batch()])
        with pytest.raises(KeyboardInterrupt):
            run(model, [batch()])
        assert Interrupted.after == [True]
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        assert_same(run(model, [batch()] * 3), expected)
        assert "its recording was interrupted" in offloader.describe()


@pytest.mark.usefixtures("_interrupts")
def test_held_signals_of_handlers_of_ones_own() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with HeldInterrupts() as held:
            signal.raise_signal(signal.SIGTERM)
            assert not came
            held.let_in()
            assert came == [signal.SIGTERM]
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] * 2
        with pytest.raises(KeyboardInterrupt), HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert len(came) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
