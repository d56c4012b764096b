"""Copies that fail and Ctrl-C at any line: no step is made in part, none twice."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.engine.transfer.transport import BlockingTransport
from tests.helpers.interrupts import Interrupter, Line
from tests.helpers.plain_mezo import PlainMeZO
from tests.races.test_zeroth_order import EPSILON, RATE, Losses, words

OPTIONS: dict[str, Any] = {"host_memory_gib": 0.01}


class Failing(BlockingTransport):
    """Raises once, in place of the copy with a number."""

    def __init__(self, at: int, error: type[BaseException], kind: str) -> None:
        super().__init__()
        self._left, self._error, self._kind = at, error, kind

    def _count(self, kind: str) -> None:
        if kind == self._kind:
            self._left -= 1
            if self._left == -1:
                raise self._error

    def offload(self, *args: Any, **options: Any) -> Any:
        self._count("offload")
        return super().offload(*args, **options)

    def reload(self, *args: Any, **options: Any) -> Any:
        self._count("reload")
        return super().reload(*args, **options)


class Run:
    """A run that goes on after errors, and the plain one that is to have the same weights."""

    def __init__(self, momentum: float = 0.0, transport: Any = None) -> None:
        self.model, self.losses = words(), Losses()
        self.plain_model = words()
        self.plain = PlainMeZO(self.plain_model, EPSILON, momentum, seed=3)
        settings = ZerothOrderSettings(epsilon=EPSILON, momentum=momentum, seed=3)
        self.made = ZerothOrder(self.model, settings, transport=transport, **OPTIONS)

    def step(self) -> None:
        for batch in self.losses.batches:
            self.made.accumulate(self.model, lambda model: model(batch))
        self.made.end_step(RATE)

    def drop_micro_batches(self) -> None:
        """Begin the step anew."""
        self.made.drop_step()

    def check(self) -> None:
        while self.plain.num_steps < self.made.num_steps:
            self.plain.step(self.losses, RATE)
        self.made.close()
        for (name, p), q in zip(
            self.plain_model.named_parameters(), self.model.parameters(), strict=True
        ):
            assert torch.equal(p, q), name
        assert all(type(module._parameters) is dict for module in self.model.modules())
        left = [k for m in self.model.modules() for k in vars(m) if k.startswith("_pyao")]
        assert left == []


def survives(at: int, error: type[BaseException], kind: str, momentum: float) -> None:
    run = Run(momentum, Failing(at, error, kind))
    for _ in range(4):
        try:
            run.step()
        except error:
            run.drop_micro_batches()
    assert run.made.num_steps >= 3
    with contextlib.suppress(error):  # it may be the first copy of this
        run.made.flush()
    run.check()


@pytest.mark.parametrize("kind", ["offload", "reload"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.sampled(every=3)
def test_a_copy_that_fails_leaves_the_step_out(
    error: type[BaseException], kind: str, momentum: float
) -> None:
    for at in range(0, 60, 7):
        survives(at, error, kind, momentum)


def lines_of_a_step() -> list[Line]:
    run, lines = Run(), list[Line]()
    run.step()
    with Interrupter(note=lines.append):
        run.step()
    run.made.close()
    return lines


def interrupt_at(number: int, momentum: float) -> None:
    run = Run(momentum)
    run.step()
    with Interrupter(number):
        try:
            run.step()
        except KeyboardInterrupt:
            run.drop_micro_batches()
    run.step()
    run.step()
    run.check()


# Python drops an interrupt in a finalizer, such as that of the ring of a run before, and warns.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "share", [1 / 150, pytest.param(1.0, marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_ctrl_c_at_any_line_of_a_step(share: float) -> None:
    lines = lines_of_a_step()
    # Each line where it runs first and last; and some of the others.
    first_and_last = {lines.index(line) for line in set(lines)}
    first_and_last |= {len(lines) - 1 - lines[::-1].index(line) for line in set(lines)}
    generator = random.Random(0)
    chosen = sorted(first_and_last)
    if share < 1:
        some = generator.sample(chosen, max(1, int(share * len(chosen))))
        # And as a pass begins and ends, which changes what its thread reads.
        chosen = sorted({*some, *(number for number in chosen if lines[number][2] == "reading")})
    for number in chosen:
        interrupt_at(number, 0.9 * (number % 2))


def test_ctrl_c_while_weights_are_put_on_and_taken_off() -> None:
    lines: list[Line] = []
    model = words()
    with Interrupter(note=lines.append):
        ZerothOrder(model, **OPTIONS).close()
    expected = [p.detach().clone() for p in words().parameters()]
    for number in range(0, len(lines), max(1, len(lines) // 25)):
        model = words()
        made: list[ZerothOrder] = []
        with Interrupter(number):
            try:
                made.append(ZerothOrder(model, **OPTIONS))
                made[0].close()
            except KeyboardInterrupt:
                pass
        if made:
            made[0].close()
        for p, q in zip(expected, model.parameters(), strict=True):
            assert torch.equal(p, q), lines[number]
        assert all(type(module._parameters) is dict for module in model.modules()), lines[number]
