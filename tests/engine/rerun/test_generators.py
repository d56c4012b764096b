"""The lock of the random number generators is let go, wherever an interrupt comes."""

from __future__ import annotations

import contextlib
import threading

import pytest

from hf_pyao.engine.rerun.generators import ExclusiveDraws, _is_held_here, exclusive_draws
from tests.helpers.interrupts import Interrupter


def others_may_draw() -> bool:
    """Say whether another thread gets the generators at once."""
    got = threading.Event()

    def draw() -> None:
        with exclusive_draws():
            got.set()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    return got.wait(10.0)


def nested() -> None:
    with exclusive_draws():
        with exclusive_draws():
            assert _is_held_here()
        assert _is_held_here(), "the inner one must not let go what the outer one holds"


def test_an_interrupt_at_any_line_lets_them_go() -> None:
    with Interrupter() as counted:
        nested()
    assert counted.count > 8
    for at in range(counted.count):
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
            nested()
        assert not _is_held_here(), f"at line {at}"
    assert others_may_draw()


class InterruptedLock:
    """A lock whose acquisition is interrupted once it has been acquired."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._is_owned = self.lock._is_owned  # type: ignore[attr-defined]
        self.release = self.lock.release

    def acquire(self, timeout: float) -> bool:
        self.lock.acquire(timeout=timeout)
        raise KeyboardInterrupt


def test_an_interrupt_as_the_lock_was_acquired(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = InterruptedLock()
    monkeypatch.setattr("hf_pyao.engine.rerun.generators._DRAWS", lock)
    draws = ExclusiveDraws()
    with contextlib.suppress(KeyboardInterrupt):
        draws.start()
    assert _is_held_here()
    draws.stop()
    assert not _is_held_here()
    draws.stop()
