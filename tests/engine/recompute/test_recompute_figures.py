"""The figures that the page on recomputation gives are in result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
RESULTS = REPOSITORY / "recipes" / "results"
MOST = {"opt": 0.78, "gpt2": 0.36, "llama": 0.48}
"""Shares of a layer's bytes that "pointwise" may leave to store."""
PAGE = (REPOSITORY / "hf_pyao" / "engine" / "recompute" / "README.md").read_text(encoding="utf-8")


def published(name: str) -> list[dict[str, Any]]:
    assert f"recipes/results/{name}" in PAGE
    document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert document["schema_version"] == 1
    assert document["provenance"]["versions"]["torch"]
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_tracing_costs_at_most_three_times_an_empty_mode() -> None:
    rows = published("tracing_cost.json")
    assert [row["model"] for row in rows] == ["opt", "gpt2", "llama"]
    times = [row["times_empty_mode"] for row in rows]
    assert max(times) <= 3.0
    assert f"{min(times):.1f} to {max(times):.1f} times" in PAGE


def test_stored_shares_are_below_their_bounds() -> None:
    rows = {
        (row["model"].partition("-")[0], *row["recompute_modules"]): row
        for row in published("recompute_bytes.json")
    }
    for model, most in MOST.items():
        pointwise, with_attention = (
            rows[model, "pointwise"],
            rows[model, "pointwise", "core_attn"],
        )
        assert with_attention["stored_share"] < pointwise["stored_share"] <= most
        for row in (pointwise, with_attention):
            assert f"{row['stored_share']:.1%}".replace("%", " %") in PAGE
