"""Which way to train is fastest on a card, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_pyao.config import PyAOConfig
from hf_pyao.hf.flags import flags_of
from hf_pyao.plan.documents.estimate import EstimateRow
from hf_pyao.plan.hardware.caching_allocator import EXPANDABLE_SEGMENTS
from hf_pyao.plan.hardware.presets import Hardware

CHUNKED = " + chunked loss"
"""Ends the names of rows with the chunked loss."""

TIMES_WITHIN = 0.3
"""The share that predicted times are good to: a smaller lead says nothing."""


def verdict(rows: Sequence[EstimateRow], hardware: Hardware, sequence_length: int) -> str:
    """Say in words which way to take, with its flags, and how offloading and checkpointing compare.

    Args:
        rows: the ways to train, those that change least first.
        hardware: the card.
        sequence_length: tokens of a sample.
    """
    fitting = _fitting(rows)
    best = named_row(rows)
    if not fitting:
        least = best
        return (
            f"Nothing fits into {hardware.memory_gib:g} GiB at {sequence_length} tokens: the least "
            f"that is allocated is {least.peak_bytes / 1e9:.1f} GB with {least.method}, set by "
            f"{least.peak_tensor}. Take shorter sequences, LoRA, or a larger card."
        )
    speed = f"{best.tokens_per_s:,.0f} tokens/s at micro-batch {best.micro_batch}"
    name = "plain training" if best.method == "none" else best.method
    said = f"{name}, {speed}: {_flags(best)}"
    words = [f"Fastest: {said}."]
    if len(_fastest(fitting)) > 1:
        within = f"more than the {TIMES_WITHIN:.0%} that times are good to"
        words = [f"Take {said}; no other way that fits is faster by {within}."]
    grown = best.largest_with_expandable_segments
    if grown is not None and grown > best.largest_micro_batch:
        words.append(
            f"Its largest micro-batch is {grown} with {EXPANDABLE_SEGMENTS} instead of "
            f"{best.largest_micro_batch}."
        )
    if best.num_streamed_blocks:
        words.append(
            f"The weights of {best.num_streamed_blocks} of its layers are uploaded for each pass "
            f"(stream_weights='auto'), {best.weights_host_bytes / 1e9:.1f} GB of them on the host."
        )
    if best.num_disk_blocks:
        words.append(
            f"{best.num_disk_blocks} layers ({best.weights_disk_bytes / 1e9:.1f} GB) are on the "
            f"disk (disk_path), of which {best.disk_read_bytes / 1e9:.1f} GB are read in a step of "
            f"{best.step_ms / 1e3:.1f} s."
        )
    for kind, where in (("", "without the chunked loss"), (CHUNKED, "with it")):
        plain = {row.method.removesuffix(kind): row for row in fitting if _kind(row) == kind}
        checkpointing, offloading = plain.get("checkpointing"), plain.get("policy all")
        if checkpointing is None or offloading is None:
            continue
        words.append(_compare(checkpointing, offloading, hardware, where))
    return " ".join(words)


def named_row(rows: Sequence[EstimateRow]) -> EstimateRow:
    """Return the row that the verdict names: the first of the fastest, else the smallest."""
    fitting = _fitting(rows)
    return _fastest(fitting)[0] if fitting else min(rows, key=lambda row: row.peak_bytes)


def _fastest(fitting: Sequence[EstimateRow]) -> list[EstimateRow]:
    """Return the rows that no other one is clearly faster than."""
    most = max(row.tokens_per_s for row in fitting)
    return [row for row in fitting if row.tokens_per_s * (1 + TIMES_WITHIN) >= most]


def _flags(row: EstimateRow) -> str:
    """Return the flags of a script that trains as *row* does."""
    name, is_chunked, _ = row.method.partition(CHUNKED)
    given: dict[str, Any] = {"policy": "off"}
    if name.startswith("policy "):
        given["policy"] = name.split(",")[0].removeprefix("policy ")
    if name == "policy budget":
        given["budget"] = f"{row.offloaded_bytes / 2**30:.2f}GiB"
    if name == "long context":
        given = {"policy": "all", "long_context": True}
    if is_chunked:
        given["head_loss"] = "chunked"
    if row.num_streamed_blocks:
        given["stream_weights"] = "auto"
    flags = [flags_of(PyAOConfig.from_dict(given))] if given != {"policy": "off"} else []
    if name == "checkpointing":
        flags.append("--gradient_checkpointing")
    flags = flags or ["no flags but"]
    return " ".join([*flags, f"--per_device_train_batch_size {row.micro_batch}"])


def _fitting(rows: Sequence[EstimateRow]) -> list[EstimateRow]:
    return [row for row in rows if row.fits and row.largest_micro_batch]


def _kind(row: EstimateRow) -> str:
    return CHUNKED if row.method.endswith(CHUNKED) else ""


def _compare(
    checkpointing: EstimateRow, offloading: EstimateRow, hardware: Hardware, name: str
) -> str:
    ratio = offloading.tokens_per_s / checkpointing.tokens_per_s
    hidden = offloading.hidden or 0.0
    carried = hardware.link.d2h_gib_per_s
    if ratio >= 1 + TIMES_WITHIN:
        return (
            f"Offloading everything is {ratio - 1:.0%} faster than checkpointing ({name}): "
            f"{hidden:.0%} of its copies pass under compute, and no layer runs twice."
        )
    if 1 / ratio >= 1 + TIMES_WITHIN:
        return (
            f"Checkpointing is {1 / ratio - 1:.0%} faster than offloading everything ({name}), "
            f"because the layers save more than {carried:.0f} GiB/s carry: {hidden:.0%} of the "
            "copies pass under compute."
        )
    return f"Offloading everything and checkpointing are about equally fast ({name})."
