"""Threads beside a disk: they end, and nothing waits for them at the end of a process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_pyao.engine.rerun.generators import may_be_disturbed
from hf_pyao.engine.stores.disk_threads import DaemonThreads
from hf_pyao.errors import InternalError


def started(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_all_work_is_done_before_they_end() -> None:
    done: list[int] = []
    threads = DaemonThreads(3, "pyao-test-work")
    for number in range(50):
        threads.submit(done.append, number)
    threads.close()
    assert sorted(done) == list(range(50))
    assert started("pyao-test-work") == []
    with pytest.raises(InternalError, match="pyao-test-work"):
        threads.submit(done.append, 50)
    threads.close()


def test_they_work_at_once_and_do_not_count_as_threads_that_draw() -> None:
    others_before = may_be_disturbed()
    met = threading.Barrier(3)
    threads = DaemonThreads(3, "pyao-test-meet")
    for _ in range(3):
        threads.submit(met.wait, 30.0)
    assert may_be_disturbed() == others_before
    threads.close()
    assert not met.broken


def test_they_end_when_no_one_has_them() -> None:
    threads = DaemonThreads(2, "pyao-test-gone")
    threads.submit(int)
    threads.submit(int)
    del threads
    gc.collect()
    until = time.monotonic() + 30.0
    while started("pyao-test-gone") and time.monotonic() < until:
        time.sleep(0.01)
    assert started("pyao-test-gone") == []


def test_fewer_threads_do_the_work_where_no_more_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = DaemonThreads(3, "pyao-test-few")
    threads.submit(int)
    monkeypatch.setattr(threading.Thread, "start", raise_runtime_error)
    done: list[int] = []
    for number in range(4):
        threads.submit(done.append, number)
    threads.close()
    assert done == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="no more"):
        DaemonThreads(1, "pyao-test-none").submit(int)


@pytest.mark.thorough
def test_an_access_that_does_not_return_does_not_keep_the_process() -> None:
    program = (
        "import threading\n"
        "from hf_pyao.engine.stores.disk_threads import DaemonThreads\n"
        "threads = DaemonThreads(1, 'stuck')\n"
        "threads.submit(threading.Event().wait)\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=root)


def raise_runtime_error(thread: threading.Thread) -> None:
    raise RuntimeError("no more")
