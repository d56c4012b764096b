"""Which figures go to the logs, and how a run is told in a line."""

from __future__ import annotations

import pytest

from hf_pyao.metrics import (
    MicroBatchStats,
    RunTotals,
    describe_totals,
    format_bytes,
    select_metrics,
)

MIB = 2**20

STATS = MicroBatchStats(
    would_hold_bytes=54 * MIB,
    offloaded_bytes=40 * MIB,
    transfer_ms=20.0,
    stall_forward_ms=1.0,
    stall_backward_ms=4.0,
    device_peak_bytes=3 * 2**30,
    num_packs=1,
)
STATS.kept_bytes["last layer"] = 14 * MIB


def test_a_summary_is_a_few_figures() -> None:
    values = STATS.as_dict()
    assert select_metrics(values, "summary", has_device=True) == {
        "offloaded_bytes": 40 * MIB,
        "held_bytes": 14 * MIB,
        "device_peak_bytes": 3 * 2**30,
        "stall_ms": 5.0,
        "overlap_efficiency": 0.75,
    }
    on_cpu = select_metrics(values, "summary", has_device=False)
    assert set(on_cpu) == {"offloaded_bytes", "held_bytes"}
    recomputed = {**values, "recomputed_bytes": 7}
    assert select_metrics(recomputed, "summary", has_device=False)["recomputed_bytes"] == 7
    assert select_metrics(values, "all", has_device=False) == values
    assert select_metrics(values, "off", has_device=True) == {}
    assert select_metrics({}, "summary", has_device=True) == {}


def test_a_run_in_a_line() -> None:
    totals = RunTotals()
    assert "no micro-batch" in describe_totals(totals.as_dict(), has_device=True)
    for _ in range(3):
        totals.add(STATS)
    start = "hf_pyao moved 40.0 MiB of the 54.0 MiB that the layers saved for backward, per "
    start += "micro-batch (3 in all)"
    assert describe_totals(totals.as_dict(), has_device=False) == f"{start}."
    assert describe_totals(totals.as_dict(), has_device=True) == (
        f"{start}; compute waited 5.0 ms for copies (75 % hidden); device peak 3.0 GiB."
    )
    recomputed = {**totals.as_dict(), "recomputed_bytes": 3 * MIB}
    line = describe_totals(recomputed, has_device=False)
    assert line.startswith("hf_pyao moved 40.0 MiB and recomputed 1.0 MiB of the 54.0 MiB")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (2**40, "1,024.0 GiB")],
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
