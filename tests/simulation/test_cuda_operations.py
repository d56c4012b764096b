"""What is replaced for the whole process is put back, whichever threads replace it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from hf_pyao.integrations.quiet import quiet, quiet_fake_tensors
from hf_pyao.simulation.cuda_operations import Replacement, replaced

PLACE = SimpleNamespace(name=len)


def replace_name() -> AbstractContextManager[None]:
    return replaced(Replacement(PLACE, "name", abs))


def state() -> tuple[object, ...]:
    names = "hf_pyao", "torch._subclasses.fake_tensor"
    return PLACE.name, *(logging.getLogger(name).level for name in names)


@pytest.mark.parametrize("change", [replace_name, quiet, quiet_fake_tensors])
def test_two_threads_put_back_what_was_there(
    change: Callable[[], AbstractContextManager[None]],
) -> None:
    before = state()
    has_entered, may_leave = threading.Event(), threading.Event()

    def second() -> None:
        with change():
            has_entered.set()
            may_leave.wait(30)

    thread = threading.Thread(target=second)
    with change():
        assert state() != before
        thread.start()
        assert not has_entered.wait(0.1), "two at a time"
    assert has_entered.wait(30)
    may_leave.set()
    thread.join()
    assert state() == before
