"""Figures of a micro-batch are its own where the host runs ahead of the device."""

from __future__ import annotations

from typing import Any

import pytest

from hf_pyao import attach
from hf_pyao.engine.transfer.transport import BlockingTransport, LinkTimes
from hf_pyao.metrics import MicroBatchStats
from tests.helpers import EVERYTHING, tiny_batch, tiny_model


class RunsAhead(BlockingTransport):
    """Times are known only when the device is waited for; each copy takes what :attr:`ms` says."""

    def __init__(self) -> None:
        super().__init__()
        self.ms = 1.0
        self.copies: list[tuple[LinkTimes, float]] = []
        self.is_synchronized = False

    def offload(self, *args: Any, times: LinkTimes | None = None, **kwargs: Any) -> Any:
        self._note(times)
        return super().offload(*args, times=LinkTimes(), **kwargs)

    def reload(self, *args: Any, times: LinkTimes | None = None, **kwargs: Any) -> Any:
        self._note(times)
        return super().reload(*args, times=LinkTimes(), **kwargs)

    def _note(self, times: LinkTimes | None) -> None:
        assert times is not None
        self.copies.append((times, self.ms))

    def collect(self, stats: MicroBatchStats, times: LinkTimes) -> None:
        if self.is_synchronized:
            for of, ms in self.copies:
                of.transfer_ms += ms
                of.add_stall(2 * ms, in_backward=True)
            self.copies.clear()
        times.move_to(stats)


def test_after_a_synchronization_they_are_complete_and_no_other_micro_batch_s() -> None:
    model = tiny_model("llama").train()
    transport = RunsAhead()
    with attach(model, EVERYTHING, transport=transport) as offloader:
        for transport.ms in (1.0, 100.0, 10_000.0):
            model(**tiny_batch(0)).loss.backward()
        num_copies = len(transport.copies) // 3
        assert num_copies > 0
        assert offloader.metrics()["transfer_ms"] == 0

        transport.is_synchronized = True
        last = offloader.metrics()
        assert last["transfer_ms"] == 10_000 * num_copies
        assert last["stall_backward_ms"] == 20_000 * num_copies
        assert offloader.metrics() == last
        totals = offloader.totals()
        assert totals["transfer_ms"] == pytest.approx(10_101 * num_copies)
        assert totals["stall_backward_ms"] == pytest.approx(20_202 * num_copies)
