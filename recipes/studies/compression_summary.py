"""The error study's runs: put together over seeds, and written."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from studies.compression_training import ALL_SLOTS, NONE

WIDE, SIGNS = "wide", "signs"
"""Kinds of runs in which only gradients are looked at."""

Run = dict[str, Any]
Key = tuple[str, ...]


def summarise(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables, from whatever runs are there."""
    kinds: dict[str, list[Run]] = {"": [], WIDE: [], SIGNS: []}
    for run in document["runs"].values():
        kinds[run.get("kind", "")].append(run)
    runs = kinds[""]
    trained = [run for run in runs if run["precision"] != "fp16"]
    return {
        "gradients": _gradients(trained),
        "wide_gradients": _gradients(kinds[WIDE]),
        "sign_gradients": _gradients(kinds[SIGNS]),
        "curves": _curves(trained),
        "overflow": _overflow([run for run in runs if run["precision"] == "fp16"]),
    }


def _grouped(runs: Iterable[Run], *names: str) -> dict[Key, list[Run]]:
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in names), []).append(run)
    return groups


def _gradients(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per model, precision, codec and slots: means over seeds and steps."""
    rows = []
    for (model, precision), references in _grouped(
        (run for run in runs if run["codec"] == NONE), "model", "precision"
    ).items():
        found = [row for run in references for row in run["gradients"]]
        for (codec, slots), group in _grouped(found, "codec", "slots").items():
            row = {
                "model": model,
                "precision": precision,
                "codec": codec,
                "slots": slots,
                "relative_error": _mean(e for g in group for e in g["relative_error"]),
                "cosine": _mean(c for g in group for c in g["cosine"]),
                "worst_layer_relative_error": max(
                    _mean(errors)
                    for errors in zip(*(g["layer_relative_error"] for g in group), strict=True)
                ),
                "worst_layer_cosine": min(
                    _mean(cosines)
                    for cosines in zip(*(g["layer_cosine"] for g in group), strict=True)
                ),
                "is_zero": not any(e for g in group for e in g["relative_error"]),
                "is_loss_equal": all(g["is_loss_equal"] for g in group),
            }
            if group[0].get("raw_bytes"):
                first = group[0]
                row["link_ratio"] = first["link_bytes"] / first["raw_bytes"]
                row["share_of_saved_bytes"] = first["raw_bytes"] / 2 / first["would_hold_bytes"]
            rows.append(row)
    return rows


def _curves(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per model, precision, codec and slots: how far from the plain run."""
    rows = []
    for (model, precision), group in _grouped(runs, "model", "precision").items():
        references = [run for run in group if run["codec"] == NONE]
        rows.append(
            {
                "model": model,
                "precision": precision,
                "codec": NONE,
                "slots": ALL_SLOTS,
                "num_seeds": len(references),
                "held_out_loss": _mean(run["held_out_loss"] for run in references),
                "held_out_spread": _spread([run["held_out_loss"] for run in references]),
                "curve_spread": _mean(
                    _spread(losses)
                    for losses in zip(*(run["losses"] for run in references), strict=True)
                ),
            }
        )
        others = (run for run in group if run["codec"] != NONE)
        for (codec, slots), same in _grouped(others, "codec", "slots").items():
            rows.append(
                {
                    "model": model,
                    "precision": precision,
                    "codec": codec,
                    "slots": slots,
                    "num_seeds": len(same),
                    "held_out_difference": _mean(run["held_out_difference"] for run in same),
                    "largest_held_out_difference": max(
                        abs(run["held_out_difference"]) for run in same
                    ),
                    "curve_difference": _mean(run["mean_abs_difference"] for run in same),
                    "is_bit_identical": all(run["is_bit_identical"] for run in same),
                }
            )
    return rows


def _overflow(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per model and codec: lists over seeds."""
    exponents = {
        (run["model"], run["seed"]): run["first_overflow_exponent"]
        for run in runs
        if run["codec"] == NONE
    }
    rows = []
    for (model, codec), group in _grouped(runs, "model", "codec").items():
        rows.append(
            {
                "model": model,
                "codec": codec,
                "num_overflows": [run["num_overflows"] for run in group],
                "num_steps": len(group[0]["losses"]),
                "first_overflow_exponent": [exponents[model, r["seed"]][codec] for r in group],
                "final_scale": [run["final_scale"] for run in group],
                "held_out_loss": _mean(run["held_out_loss"] for run in group),
            }
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    return round(statistics.mean(values), 8)


def _spread(values: list[float] | tuple[float, ...]) -> float:
    return round(statistics.stdev(values), 8) if len(values) > 1 else 0.0


def write_document(document: dict[str, Any], out: Path) -> None:
    """Replace the file at once; one line for each run or row, for they have many figures."""
    long = ("summary", "runs")
    head = {key: value for key, value in document.items() if key not in long}
    parts = [json.dumps(head, indent=2).removesuffix("\n}")]
    if "summary" in document:
        tables_of_rows = [
            f'    "{name}": [\n' + ",\n".join(f"      {_compact(row)}" for row in rows) + "\n    ]"
            for name, rows in document["summary"].items()
        ]
        parts.append('  "summary": {\n' + ",\n".join(tables_of_rows) + "\n  }")
    runs = [f'    "{name}": {_compact(run)}' for name, run in document["runs"].items()]
    parts.append('  "runs": {\n' + ",\n".join(runs) + "\n  }")
    partial = out.with_suffix(".partial")
    partial.write_text(",\n".join(parts) + "\n}\n", encoding="utf-8")
    os.replace(partial, out)


def _compact(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))
