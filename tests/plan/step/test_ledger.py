"""The memory ledger: what counts, from when, and until when."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.engine.stores import HostPool
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools import simulation
from tests.helpers.simulation.late_transport import LateTransport
from tests.helpers.simulation.transport import SimulatedTransport

KIB = 1024


def kib(number: int = 1) -> torch.Tensor:
    """Return a tensor of so many KiB."""
    return torch.zeros(number * KIB, dtype=torch.uint8)


@pytest.fixture(params=["real", "fake"])
def noting(request: pytest.FixtureRequest) -> Iterator[MemoryLedger]:
    """A ledger that hears of all operations, on real tensors and on fake ones."""
    ledger = MemoryLedger()
    with FakeTensorMode() if request.param == "fake" else nullcontext() as fake_mode:
        with NotingMode(ledger, fake_mode):
            yield ledger


def test_views_count_once_and_keep_the_whole(noting: MemoryLedger) -> None:
    base = kib(4)
    part = base.view(4, KIB)[1:2].t()
    assert noting.live_bytes == 4 * KIB
    del base
    assert noting.live_bytes == 4 * KIB
    del part
    assert noting.live_bytes == 0


def test_phases_have_peaks_of_their_own(noting: MemoryLedger) -> None:
    stays = kib(1)
    kib(4)
    noting.end_phase("high")
    kib(2)
    noting.end_phase("low")
    noting.end_phase("nothing new")
    assert noting.phase_peak_bytes == {"high": 5 * KIB, "low": 3 * KIB, "nothing new": KIB}
    assert noting.peak_bytes == 5 * KIB
    del stays


def test_noted_twice_counts_once_and_is_not_kept_alive() -> None:
    ledger = MemoryLedger()
    tensor = kib(1)
    ledger.note([tensor, tensor, tensor[5:]])
    ledger.note([tensor.detach()])
    assert ledger.live_bytes == KIB
    del tensor
    assert ledger.live_bytes == 0


def test_the_host_pool_is_left_out() -> None:
    pool = HostPool(2**20, pin=False)
    ledger = MemoryLedger(pool.owns)
    with NotingMode(ledger):
        buffer = pool.acquire(KIB)
        assert buffer is not None
        on_host = buffer.data[:KIB].view(torch.float32)
        assert ledger.live_bytes == 0
        on_device = on_host.clone()
    assert ledger.live_bytes == ledger.peak_bytes == KIB
    del on_device


def test_weak_references_of_a_transport_keep_nothing_alive() -> None:
    ledger, transport = MemoryLedger(), SimulatedTransport(0)
    source = kib(1)
    ledger.note([source])
    ticket = transport.offload(source, kib(1))
    transport.wait(ticket)
    del source
    assert ledger.live_bytes == 0  # while the ticket lives
    assert ticket.is_done


def test_the_cache_of_fake_results_is_put_back() -> None:
    with FakeTensorMode() as fake_mode:
        was_enabled = fake_mode.cache_enabled
        with NotingMode(MemoryLedger(), fake_mode):
            for _ in range(2):
                tensor = torch.empty(0, dtype=torch.uint8)
                tensor.set_(kib(1).untyped_storage(), 0, (KIB,), (1,))
        assert fake_mode.cache_enabled == was_enabled


def test_late_copies_are_done_in_order_once_something_waits() -> None:
    transport = LateTransport()
    source, target = torch.arange(4.0), torch.zeros(4)
    first, second, third = (transport.offload(source, target) for _ in range(3))
    back = transport.reload(target, torch.empty(4))
    assert not any(map(transport.is_done, (first, second, third, back)))
    transport.wait(second)
    assert [transport.is_done(t) for t in (first, second, third, back)] == [
        True,
        True,
        False,
        False,
    ]
    transport.wait(first)  # does not undo the second
    assert transport.is_done(second)
    assert torch.equal(target, source)
    assert first.nbytes == 16


EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.thorough
def test_the_example_of_the_page_runs_and_ends_quietly() -> None:
    page = Path(simulation.__file__).with_name("README.md").read_text(encoding="utf-8")
    (example,) = EXAMPLE.findall(page)
    result = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Exception ignored" not in result.stderr
    assert re.fullmatch(r"\d+\.\d\d GiB\n", result.stdout)
