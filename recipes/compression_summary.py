"""The error study's runs, put together over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from compression_training import ALL_SLOTS, NONE

Run = dict[str, Any]
Key = tuple[str, ...]


def summarise(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables, from whatever runs are there."""
    wide = [run for run in document["runs"].values() if "hidden" in run]
    runs = [run for run in document["runs"].values() if "hidden" not in run]
    trained = [run for run in runs if run["precision"] != "fp16"]
    return {
        "gradients": _gradients(trained),
        "wide_gradients": _gradients(wide),
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
    return statistics.mean(values)


def _spread(values: list[float] | tuple[float, ...]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
