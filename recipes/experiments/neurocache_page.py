"""The page's parts and the plot of NeuroCache's tables."""

from __future__ import annotations

from typing import Any

from experiments.neurocache import CONFIGURATIONS, FUSED
from experiments.page import bullets, paper, paragraph, table
from experiments.plots import grouped_bars, lines
from experiments.rows import OUT_OF_MEMORY, one, select, values


def _paper_table(document: dict[str, Any]) -> str:
    rows = []
    for system in values(document["rows"], "system"):
        cells = [system]
        for row in select(document["rows"], system=system):
            mark = " OOM" if row["status"] == OUT_OF_MEMORY else ""
            ours = "–" if row["value"] is None else f"{row['value']:.1f}{mark}"
            cells += [paper("{published:g}")(row) or "not in it", ours]
        rows.append(cells)
    heads = ["", "its peak, MB", "ours, MiB", "its tokens/s", "ours"]
    return table(heads, rows)


def _measured_table(document: dict[str, Any]) -> str:
    rows = []
    for system in values(document["rows"], "system"):
        cells = [system]
        for row in select(document["rows"], system=system):
            spread = row["detail"].get("standard_deviation")
            cells.append("–" if row["value"] is None else f"{row['value']:.1f} ± {spread:.1f}")
        rows.append(cells)
    return table(["", "held after forward, MiB", "tokens/s", "pack time, ms"], rows)


def predicted_table_1(found: dict[str, Any]) -> list[str]:
    """Write of NeuroCache's Table 1, predicted."""
    return _predicted(found, _reasons_1(found))


def predicted_table_2(found: dict[str, Any]) -> list[str]:
    """Write of NeuroCache's Table 2, predicted."""
    none, first = (one(found["rows"], system=f"k = {k}", unit="MiB") for k in (0, 1))
    reasons = [
        f"Each tensor saves {none['value'] - first['value']:.1f} MiB here and "
        f"{none['published'] - first['published']:.1f} MB in the paper. Ours is flat in "
        "throughput: the copies pass under compute. The paper's moves by 2 % without a "
        "direction.",
        "Its packs are 11 k over what it calls a step: ten measured steps and a warm-up, so "
        "that its pack times are likely sums, too. Ours, in the miniature, are of one step.",
        "No knee is in either by the definition of hf_pyao/plan/README.md.",
    ]
    return _predicted(found, reasons)


def predicted_validation(found: dict[str, Any]) -> list[str]:
    """Write of NeuroCache's 20-step validation, predicted."""
    reasons = [
        "A prediction has no steps to average: it is Table 1's. The paper's two runs differ "
        "by less than its noise, and its saving is 15.1 %.",
    ]
    return _predicted(found, reasons)


def _predicted(found: dict[str, Any], reasons: list[str]) -> list[str]:
    return [paragraph("*Mode: predict.*"), _paper_table(found), bullets(reasons)]


def measured_sweep(small: dict[str, Any]) -> list[str]:
    """Write of a sweep over k, in miniature."""
    equal = "have equal bits" if small["are_gradients_equal"] else "differ"
    return [
        paragraph(
            f"*Mode: miniature.* {small['num_seeds']} seeds of {small['num_steps']} steps of a "
            "GPT-2 of 6 layers of width 128 with checkpointing, on a CPU that others used, "
            f"too. Gradients of all budgets {equal}; differences in throughput below "
            f"{small['noise_tokens_per_s']:.0f} tokens/s are noise."
        ),
        _measured_table(small),
    ]


def _reasons_1(document: dict[str, Any]) -> list[str]:
    def peak(name: str) -> tuple[float, float]:
        row = one(document["rows"], system=name, unit="MiB")
        return row["value"], row["published"] or 0.0

    names = [name for name, *_ in CONFIGURATIONS]
    (plain, its_plain), (wide, its_wide), (narrow, its_narrow), (ours, its) = map(peak, names)
    return [
        f"16-bit moments save {wide - narrow:.0f} MiB here, 4 bytes a parameter; "
        f"{its_wide - its_narrow:.0f} in the paper. k = 5 saves {narrow - ours:.1f} and "
        f"{its_narrow - its:.1f}: the same.",
        f"With checkpointing our peaks are {1 - wide / its_wide:.1%} and "
        f"{1 - narrow / its_narrow:.1%} below the paper's: what else is on its device is not in "
        "its text.",
        "16-bit moments are predicted and were not run: the libraries that were looked at keep "
        "moments of float32 weights in 8 or 4 bits (torchao 0.18, bitsandbytes 0.50), or in the "
        "weights' own type (torch).",
        f"Without checkpointing ours is {plain:,.0f} MiB and the paper's {its_plain:,.0f}: "
        "transformers' GPT-2 computes gelu in several operations that each save their result. "
        f"With gelu as one kernel it is {peak(FUSED)[0]:,.0f}. Neither fits into 4 GiB: in the "
        "paper it must have spilled into the host's memory, which explains its tokens/s and is "
        "not in a prediction.",
        "Our speed has no optimizer in it, and a laptop's power limit may not allow the data "
        "sheet's rate (hf_pyao/plan/README.md).",
        "It has no engine over several nodes: no row for ZeRO-1 or DDP.",
    ]


def plot_sweep(document: dict[str, Any]) -> Any:
    """Draw memory over k, ours and the paper's."""
    unit = "MiB"
    points = []
    for row in select(document["rows"], unit=unit):
        k = float(row["system"].rpartition(" ")[2])
        points.append((row["quantity"], "ours", k, row["value"]))
        if row["published"] is not None:
            points.append((row["quantity"], "the paper's, MB", k, row["published"]))
    return lines(points, "k, tensors that leave", f"memory, {unit}")


def plot_configurations(document: dict[str, Any]) -> Any:
    """Draw each configuration's memory, ours and the paper's."""
    bars = []
    for row in select(document["rows"], unit="MiB"):
        bars.append((row["system"], "ours", row["value"]))
        if row["published"] is not None:
            bars.append((row["system"], "the paper's, MB", row["published"]))
    return grouped_bars(bars, "memory, MiB")
