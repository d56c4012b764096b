"""Passes that run in turns: no interrupt leaves one of them waiting, or the generators held."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_pyao.auto.zeroth_order.lock_step import LockStep
from tests.helpers.interrupts import Interrupter

CPU = torch.device("cpu")


def run(lock_step: LockStep, turns: list[int]) -> list[int]:
    def of(number: int) -> int:
        for _ in range(3):
            turns.append(number)
            lock_step.end_layer(number)
        return number

    return lock_step.run([lambda: of(0), lambda: of(1)])


def ready() -> LockStep:
    """Return one that knows by a first run that passes may take turns."""
    made = LockStep(CPU)
    run(made, [])
    return made


def passes_left() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("pyao-pass")]


def test_an_interrupt_at_any_line_ends_all_passes() -> None:
    lock_step = ready()
    with Interrupter() as counted:
        run(lock_step, [])
    interrupted = 0
    for at in range(counted.count):
        lock_step, before = ready(), torch.get_rng_state()
        try:
            with Interrupter(at):
                run(lock_step, [])
        except KeyboardInterrupt:
            interrupted += 1
        assert passes_left() == [], f"at line {at}"
        assert torch.equal(torch.get_rng_state(), before)
        turns: list[int] = []
        assert run(lock_step, turns) == [0, 1], "it goes on as if nothing had happened"
        assert turns == [0, 1] * 3
    assert interrupted > 0.9 * counted.count


def test_a_thread_that_begins_after_its_run_was_given_up_runs_no_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an interrupt in ``Thread.start`` leaves it, on a machine with much to do."""
    late: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    turns, calls = ready(), list[int]()
    passes = [lambda number=number: calls.append(number) for number in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            turns.run(passes)

    def begin_the_late_one() -> None:
        late[0].start()
        late[0].join(10)

    turns.run([begin_the_late_one, lambda: calls.append(7)])
    assert not late[0].is_alive()
    assert calls == [7]
