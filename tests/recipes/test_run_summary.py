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


def test_learning_and_median_step() -> None:
    table = rows(RUN)
    assert ["loss,", "on", "held-out", "text", "2.0000", "1.0000"] in table
    assert ["perplexity", "7.4", "2.7"] in table
    assert any(words[-4:] == ["of", "5", "30", "ms"] for words in table)


def test_device_table_names_the_device_its_peak_and_the_stalls() -> None:
    run = dataclasses.replace(RUN, device_name="Some GPU", device_peak_bytes=3 * 2**30)
    text = format_summary(run)
    assert COUNTED_ON_CPU not in text
    assert "measured on Some GPU" in text
    table = rows(run)
    assert "device memory, peak while training 3,072.0 MiB".split() in table
    assert ["in", "forward", "1.0", "ms"] in table
    assert ["in", "backward", "2.0", "ms"] in table


def test_a_chunked_head_loss_has_a_line() -> None:
    metrics = {
        "head_loss_num_chunked": 4.0,
        "head_loss_num_chunks": 3.0,
        "head_loss_chunk_tokens": 1216.0,
    }
    run = dataclasses.replace(RUN, head_loss_metrics=metrics)
    assert "head loss in 3 chunks of 1,216 tokens".split() in rows(run)
    run = dataclasses.replace(RUN, head_loss_metrics={**metrics, "head_loss_num_chunks": 1.0})
    assert "head loss in 1 chunk of 1,216 tokens".split() in rows(run)
    for own in ({}, {**metrics, "head_loss_num_chunked": 0.0}):
        assert "head loss" not in format_summary(dataclasses.replace(RUN, head_loss_metrics=own))


def test_what_was_not_done_is_said() -> None:
    run = dataclasses.replace(RUN, loss_before=None, step_ms=(), offload_metrics={})
    text = format_summary(run)
    assert "not measured" in text
    assert "no step taken" in text
    assert "activations were not offloaded" in text


def test_failed_training_and_several_processes_are_shown() -> None:
    run = dataclasses.replace(RUN, loss_after=float("nan"), loss_before=1e4, num_processes=2)
    table = rows(run)
    assert ["perplexity", "inf", "nan"] in table
    assert "each of 2 processes" in format_summary(run)
    assert "on the first process" in format_summary(run)


def test_what_could_not_be_recomputed_is_shown_with_its_reason() -> None:
    counted = {
        "recomputed_bytes": 4 * MIB,
        "not_recomputed_bytes/compiled code": 2 * MIB,
        "not_recomputed_bytes/sources are no smaller": 8 * MIB,
    }
    run = dataclasses.replace(RUN, offload_metrics={**RUN.offload_metrics, **counted})
    lines = format_summary(run).splitlines()
    start = lines.index("to be recomputed, but kept or moved because")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        "sources are no smaller 2.0 MiB".split(),
        "compiled code 0.5 MiB".split(),
    ]
    assert "dropped, and recomputed in backward" in "\n".join(lines)
    assert "to be recomputed" not in format_summary(RUN)
