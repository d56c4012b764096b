"""The page of a GPU day: what was predicted, what was measured, and what others measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_pyao.plan.documents.bench import OK
from on_gpu.day import Line, problems_of
from on_gpu.parts import PARTS
from on_gpu.rows import Row, all_rows

NOT_MEASURED = "–"

COLUMNS: tuple[tuple[str, str, float], ...] = (
    ("step_ms", "ms", 1.0),
    ("allocated_bytes", "allocated GB", 1e9),
    ("reserved_bytes", "reserved GB", 1e9),
    ("offloaded_bytes", "moved GB", 1e9),
)
"""Figure, its heading, and what it is divided by."""

DERIVED: Mapping[str, tuple[str, float]] = {
    "after_forward_mb": ("after_forward_bytes", 1e6),
    "growth_gb": ("growth_bytes", 1e9),
    "reserved_gib": ("reserved_bytes", 2**30),
    "ours_peak_gb": ("ours_peak_bytes", 1e9),
    "before_ms": ("torch_ms", 1.0),
}
"""Figures as others give them: ours, and what it is divided by."""

PAIRS = (
    ("auto", "checkpointing"),
    ("auto + chunked", "checkpointing"),
    ("all", "checkpointing"),
    ("checkpointing", "nothing"),
    ("all", "nothing"),
    ("auto", "nothing"),
    ("long_context", "checkpointing"),
)
"""Ways whose times are compared, where a part has both at one size."""


def page_of(lines: Sequence[Line], about: Mapping[str, Any], predictions: Mapping[str, Any]) -> str:
    """Return the page, in Markdown.

    Args:
        lines: of a day; none: the page has predictions alone.
        about: device, command, commit and so on, a line each.
        predictions: by card and attention, then by row; see ``predict.py``.
    """
    by_name = {line["name"]: line for line in lines}
    card = _card_of(str(about.get("device", "")), predictions)
    predicted = predictions.get(card, {})
    text = ["# A GPU, asked for thirteen minutes", ""]
    text += [f"- {key}: {value}" for key, value in about.items()]
    text += [f"- predictions: {card or 'none for this card'}", ""]
    problems = problems_of(lines)
    if lines:
        text += ["## What is wrong", "", *[f"- {each}" for each in problems or ["nothing"]], ""]
    text += ["## Claims", "", *claims(by_name, predicted), ""]
    for part, what in PARTS.items():
        rows = [row for row in all_rows() if row.part == part]
        others = [line for line in lines if _part_of(line) == part]
        if not rows and not others:
            continue
        text += [f"## {part}: {what.summary}", ""]
        if rows:
            text += [*rows_table(rows, by_name, predicted), ""]
        text += published_table(rows, by_name)
        known = {row.name for row in rows}
        text += facts_table([line for line in others if line["name"] not in known])
    return "\n".join(text)


def claims(by_name: Mapping[str, Line], predicted: Mapping[str, Any]) -> list[str]:
    """Return the table of what is claimed of pairs of ways: ratios of their times."""
    text = ["| claim | predicted | measured | ratio |", "|---|--:|--:|--:|"]
    rows = all_rows()
    for row in rows:
        for way, base in PAIRS:
            if row.way != way or row.part not in "FHK":
                continue
            other = next((each for each in rows if _same_but_way(each, row, base)), None)
            if other is None:
                continue
            values = [
                _quotient(_figure(row, source, "step_ms"), _figure(other, source, "step_ms"))
                for source in (predicted, by_name)
            ]
            label = row.name.replace(f", {way}", "")
            text.append(f"| {label}: time of {way} over {base} | {_cells(*values)} |")
    fits = [row for row in rows if row.part in ("G", "G2")]
    for row in fits:
        line = by_name.get(row.name)
        measured = NOT_MEASURED if line is None else "fits" if line["status"] == OK else "does not"
        claim = "does not" if row.may_run_out else "fits"
        right = NOT_MEASURED if line is None else "right" if claim == measured else "**wrong**"
        text.append(f"| {row.name} | {claim} | {measured} | {right} |")
    return text


def _same_but_way(one: Row, other: Row, way: str) -> bool:
    same = ("part", "model", "micro_batch", "tokens", "dtype", "attention", "cap_gib")
    return one.way == way and all(getattr(one, key) == getattr(other, key) for key in same)


def rows_table(
    rows: Sequence[Row], by_name: Mapping[str, Line], predicted: Mapping[str, Any]
) -> list[str]:
    """Return *predicted | measured | ratio* of each figure of each row."""
    heads = [f"{title} predicted | measured | ratio" for _, title, _ in COLUMNS]
    text = [f"| | {' | '.join(heads)} | |", "|---|" + "--:|" * (3 * len(COLUMNS)) + "---|"]
    for row in rows:
        cells = [
            _cells(_figure(row, predicted, name, unit), _figure(row, by_name, name, unit))
            for name, _, unit in COLUMNS
        ]
        line = by_name.get(row.name, {"status": OK})
        note = "" if line["status"] == OK else f"{line['status']}: {line.get('reason', '')}"
        text.append(f"| {row.name} | {' | '.join(cells)} | {_escaped(note)} |")
    return text


def published_table(rows: Sequence[Row], by_name: Mapping[str, Line]) -> list[str]:
    """Return what others published, what theirs takes on this card, and what ours does."""
    text = []
    for row in rows:
        same = [each for each in rows if row.ours and _same_but_way(each, row, row.ours)]
        for name, theirs in row.published.items():
            key, unit = DERIVED.get(name, (name, 1.0))
            here = _figure(row, by_name, key, unit)
            ours_here = _figure(same[0], by_name, key, unit) if same else None
            cells = " | ".join(map(_number, (theirs, here, ours_here)))
            beside = f"{row.ours}: " if row.ours else ""
            text.append(f"| {row.name} | {name} | {cells} | {beside}{row.source} |")
    if not text:
        return []
    head = ["| | figure | theirs | theirs on this card | ours | |", "|---|---|--:|--:|--:|---|"]
    return [*head, *text, ""]


def facts_table(lines: Iterable[Line]) -> list[str]:
    """Return all figures of lines that are no steps."""
    text: list[str] = []
    for line in lines:
        text += [f"**{line['name']}**: {line['status']} {_escaped(line.get('reason', ''))}", ""]
        figures = line.get("figures", {})
        published = line.get("setup", {}).get("published", {})
        for name, value in figures.items():
            text.append(f"- {name}: {_number(value)}")
        for name, value in published.items():
            ours, unit = DERIVED.get(name, (name, 1.0))
            measured = figures.get(ours)
            here = NOT_MEASURED if measured is None else _number(measured / unit)
            text.append(f"- {name}: theirs {value:g}, on this card {here}")
        text.append("")
    return text


def _figure(row: Row, source: Mapping[str, Any], name: str, unit: float = 1.0) -> float | None:
    found = source.get(row.name, {})
    value = found.get("figures", found).get(name)
    return None if value is None else value / unit


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _cells(predicted: float | None, measured: float | None) -> str:
    return " | ".join(map(_number, (predicted, measured, _quotient(measured, predicted))))


def _number(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


def _part_of(line: Line) -> str:
    return str(line["name"]).partition(":")[0]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _card_of(device: str, predictions: Mapping[str, Any]) -> str:
    name = device.lower()
    return next((card for card in predictions if card in name), next(iter(predictions), ""))
