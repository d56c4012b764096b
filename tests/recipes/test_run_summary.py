"""The table, against figures worked out by hand."""

from __future__ import annotations

import dataclasses

from run_summary import COUNTED_ON_CPU, RunSummary, format_summary

MIB = 2**20

RUN = RunSummary(
    title="a model on a text",
    device_name=None,
    num_processes=1,
    micro_batch=8,
    block_size=128,
    loss_before=2.0,
    loss_after=1.0,
    step_ms=(900.0, 10.0, 30.0, 20.0, 40.0),
    device_peak_bytes=None,
    offload_metrics={
        "num_micro_batches": 4,
        "would_hold_bytes": 40 * MIB,
        "held_bytes": 10 * MIB,
        "offloaded_bytes": 30 * MIB,
        "reloaded_bytes": 30 * MIB,
        "recomputed_bytes": 0,
        "kept_bytes/below min_bytes": 2 * MIB,
        "kept_bytes/last layer": 8 * MIB,
        "stall_forward_ms": 4.0,
        "stall_backward_ms": 8.0,
    },
)


def rows(run: RunSummary) -> list[list[str]]:
    """Return the table's lines as words."""
    return [line.split() for line in format_summary(run).splitlines() if line]


def test_cpu_table_is_headed_so_that_nobody_takes_it_for_a_saving() -> None:
    assert format_summary(RUN).splitlines()[1:3] == ["a model on a text", COUNTED_ON_CPU]
    assert COUNTED_ON_CPU == "counted; host stands in for the device"


def test_bytes_are_of_one_micro_batch_and_reasons_are_sorted_by_size() -> None:
    table = rows(RUN)
    labels = [" ".join(words[:-2]) for words in table if words[-1] == "MiB"]
    assert labels == [
        "autograd would have held on the device",
        "held on the device",
        "moved to the host",
        "moved back",
        "last layer",
        "below min_bytes",
    ]
    assert [words[-2] for words in table if words[-1] == "MiB"] == [
        *("10.0", "2.5", "7.5", "7.5", "2.0", "0.5")
    ]


def test_device_table_names_the_device_its_peak_and_the_stalls() -> None:
    run = dataclasses.replace(RUN, device_name="Some GPU", device_peak_bytes=3 * 2**30)
    text = format_summary(run)
    assert COUNTED_ON_CPU not in text
    assert "measured on Some GPU" in text
    table = rows(run)
    assert "device memory, peak while training 3,072.0 MiB".split() in table
    assert ["in", "forward", "1.0", "ms"] in table
    assert ["in", "backward", "2.0", "ms"] in table
