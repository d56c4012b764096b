"""Tables and plot of the error study."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_pyao.quantities import ABSENT
from hf_pyao.tools.report.markdown import table
from studies.compression_training import (
    ALL_SLOTS,
    LOSSLESS,
    LOSSY,
    NONE,
    NUDGED,
    SIGN_KEEPING,
    SLOTS,
)

Rows = list[dict[str, Any]]
_SIGN_CODECS = ("int8", SIGN_KEEPING)
_NAMES = {"opt": "OPT", "gpt2": "GPT-2", "llama": "Llama"}
_COLOURS = {"opt": "#0b7a75", "gpt2": "#d9822b", "llama": "#5b62b3"}
_MARKERS = {"int8": "o", "int8_group": "s", "int8_tensor": "^", "fp8": "D", "int4": "v"}


def tables(document: dict[str, Any]) -> str:
    """Return the summary of *document* as Markdown tables."""
    summary = document["summary"]
    return "\n\n".join(
        [
            "Relative error of the gradient, everything compressed (in brackets: worst layer)",
            _gradient_table(summary["gradients"]),
            "Relative error of the gradient, by what is compressed, bf16",
            _slot_table(summary["gradients"]),
            "The same in the wide models",
            _slot_table(summary["wide_gradients"]),
            "The same with an int8 that rounds nothing to zero",
            _sign_table(summary["sign_gradients"]),
            "Mean distance of the loss curve from the plain one, everything compressed",
            _curve_table(summary["curves"]),
            "Held-out loss less that of the plain run, everything compressed (in brackets: the "
            "largest of a seed, either way)",
            _held_out_table(summary["curves"]),
            "Distance of curves, and held-out loss, by what is compressed",
            _part_table(summary["curves"]),
            "fp16 autocast, steps skipped for overflow in each seed, of "
            f"{summary['overflow'][0]['num_steps'] if summary['overflow'] else 0}; "
            "in brackets: the first power of two at which the loss scale overflows",
            _overflow_table(summary["overflow"]),
        ]
    )


def _cells(rows: Rows) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["model"], row["precision"]) for row in rows))


def _find(rows: Rows, **wanted: str) -> dict[str, Any] | None:
    matches = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return next(matches, None)


def _grid(
    rows: Rows, codecs: tuple[str, ...], say: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    lines = []
    for codec in codecs:
        line = [codec]
        for model, precision in _cells(rows):
            row = _find(rows, model=model, precision=precision, codec=codec, slots=ALL_SLOTS)
            line.append(ABSENT if row is None else say(row))
        if any(cell != ABSENT for cell in line[1:]):
            lines.append(line)
    return lines


def _header(rows: Rows) -> list[str]:
    return [f"{_NAMES[model]} {precision}" for model, precision in _cells(rows)]


def _gradient_table(rows: Rows) -> str:
    def say(row: dict[str, Any]) -> str:
        if row["is_zero"]:
            return "0"
        return f"{_percent(row['relative_error'])} ({_percent(row['worst_layer_relative_error'])})"

    lines = _grid(rows, (*LOSSY, *LOSSLESS, "bf16 itself", "another batch"), say)
    for line in lines:
        ratios = [
            row["link_ratio"] for row in rows if _is_whole(row, line[0]) and "link_ratio" in row
        ]
        line.insert(1, f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else ABSENT)
    return table(["codec", "link bytes", *_header(rows)], lines)


def _sign_table(rows: Rows) -> str:
    columns = [(slots, codec) for slots in ("mlp_act", ALL_SLOTS) for codec in _SIGN_CODECS]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        line = [_NAMES[model]]
        for slots, codec in columns:
            row = _find(rows, model=model, slots=slots, codec=codec)
            line.append(ABSENT if row is None else _percent(row["relative_error"]))
        lines.append(line)
    return table(["model", *(f"{slots}: {codec}" for slots, codec in columns)], lines)


def _percent(share: float) -> str:
    """Two significant digits, or whole."""
    return f"{share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}%}"


def _is_whole(row: dict[str, Any], codec: str) -> bool:
    return row["codec"] == codec and row["slots"] == ALL_SLOTS


def _slot_table(rows: Rows) -> str:
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for slots in SLOTS:
            label = {"model": model, "precision": "bf16", "slots": slots}
            found = [_find(rows, codec=codec, **label) for codec in LOSSY]
            if found[0] is not None:
                share = f"{found[0]['share_of_saved_bytes']:.0%}"
                errors = [_percent(row["relative_error"]) for row in found if row is not None]
                lines.append([_NAMES[model], slots, share, *errors])
    return table(["model", "compressed", "of the bytes", *LOSSY], lines, num_text_columns=2)


def _curve_table(rows: Rows) -> str:
    def say(row: dict[str, Any]) -> str:
        if row["codec"] == NONE:
            return f"{row['curve_spread']:.4f}"
        return "0" if row["is_bit_identical"] else f"{row['curve_difference']:.4f}"

    return _loss_table(rows, say)


def _held_out_table(rows: Rows) -> str:
    def say(row: dict[str, Any]) -> str:
        if row["codec"] == NONE:
            return f"{row['held_out_spread']:.4f}"
        return "0" if row["is_bit_identical"] else _held_out(row)

    return _loss_table(rows, say)


def _loss_table(rows: Rows, say: Callable[[dict[str, Any]], str]) -> str:
    lines = _grid(rows, (NONE, NUDGED, *LOSSY, *LOSSLESS), say)
    for line in lines:
        line[0] = {NONE: "spread of seeds"}.get(line[0], line[0])
    return table(["codec", *_header(rows)], lines)


def _held_out(row: dict[str, Any]) -> str:
    return f"{row['held_out_difference']:+.4f} ({row['largest_held_out_difference']:.4f})"


def _part_table(rows: Rows) -> str:
    parts = [row for row in rows if row["slots"] != ALL_SLOTS]
    lines = []
    for codec, slots in dict.fromkeys((row["codec"], row["slots"]) for row in parts):
        line = [codec, slots]
        for model, precision in _cells(parts):
            label = {"model": model, "precision": precision, "slots": slots}
            row = _find(parts, codec=codec, **label)
            said = ABSENT if row is None else f"{row['curve_difference']:.4f}, {_held_out(row)}"
            line.append(said)
        lines.append(line)
    return table(["codec", "compressed", *_header(parts)], lines, num_text_columns=2)


def _overflow_table(rows: Rows) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for codec in dict.fromkeys(row["codec"] for row in rows):
        line = [codec]
        for model in models:
            row = _find(rows, model=model, codec=codec)
            line.append(ABSENT if row is None else _skipped(row))
        lines.append(line)
    return table(["codec", *(_NAMES[model] for model in models)], lines)


def _skipped(row: dict[str, Any]) -> str:
    skipped = ", ".join(map(str, row["num_overflows"]))
    return f"{skipped} ({', '.join(map(str, row['first_overflow_exponent']))})"


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the plot: what a codec costs in accuracy, at the bytes that it leaves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_gradients(left, document["summary"]["gradients"])
    _draw_losses(right, document["summary"]["curves"])
    figure.savefig(path, dpi=110)


def _draw_gradients(axes: Any, rows: Rows) -> None:
    for row in rows:
        if row["slots"] == ALL_SLOTS and row["codec"] in LOSSY:
            axes.scatter(
                row["link_ratio"],
                row["relative_error"],
                s=44,
                marker=_MARKERS[row["codec"]],
                edgecolor=_COLOURS[row["model"]],
                facecolor=_COLOURS[row["model"]] if row["precision"] == "bf16" else "white",
            )
    floors = [row["relative_error"] for row in rows if row["codec"] == "bf16 itself"]
    if floors:
        axes.axhspan(min(floors), max(floors), color="#d3d9de", zorder=0)
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
        middle = math.sqrt(min(floors) * max(floors))
        axes.text(0.02, middle, "bf16 itself", fontsize=8, **place)
    axes.set_yscale("log")
    axes.set_xlabel("bytes on the link, of those without a codec")
    axes.set_ylabel("relative error of the gradient")
    axes.set_title("Gradients at the same weights", fontsize=10)
    for codec, marker in _MARKERS.items():
        axes.scatter([], [], marker=marker, color="#7b8794", label=codec)
    for model, colour in _COLOURS.items():
        axes.scatter([], [], marker="_", s=120, color=colour, label=_NAMES[model])
    title = "filled: bf16 autocast\nhollow: fp32"
    axes.legend(fontsize=7, title=title, title_fontsize=7, loc="upper right", ncols=2)


def _draw_losses(axes: Any, rows: Rows) -> None:
    ways = [NUDGED, *LOSSY]
    spreads = {
        (row["model"], row["precision"]): row["held_out_spread"]
        for row in rows
        if row["codec"] == NONE
    }
    for row in rows:
        spread = spreads.get((row["model"], row["precision"]))
        if row["slots"] != ALL_SLOTS or row["codec"] not in ways or not spread:
            continue
        offset = (list(_COLOURS).index(row["model"]) - 1) * 0.18
        axes.scatter(
            ways.index(row["codec"]) + offset,
            row["held_out_difference"] / spread,
            s=36,
            edgecolor=_COLOURS[row["model"]],
            facecolor=_COLOURS[row["model"]] if row["precision"] == "bf16" else "white",
        )
    axes.axhspan(-1, 1, color="#eef1f3", zorder=0)
    axes.axhline(0, color="#7b8794", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(ways)), ways, rotation=20, fontsize=8)
    axes.set_ylabel("difference, in standard deviations of seeds")
    axes.set_title("Held-out loss after training, mean over seeds", fontsize=10)
