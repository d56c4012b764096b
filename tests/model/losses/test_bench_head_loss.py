"""The recipe that measures the head loss runs, and what it has measured keeps the promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import bench_head_loss

REPOSITORY = Path(__file__).parents[3]
RESULTS = REPOSITORY / "recipes" / "results"
PAGE = REPOSITORY / "hf_pyao" / "model" / "head" / "HEAD_LOSS.md"


def published(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert document["schema_version"] == 1
    assert document["provenance"]["versions"]["torch"]
    return document


def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    bench_head_loss.main(["--smoke", "--result", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["head_loss_num_chunked"] for row in rows] == [4, 4]  # warm-up, two, the ledger
    assert rows[1]["head_loss_num_chunks"] > 1


def test_published_times_are_within_115_percent_of_the_own_loss() -> None:
    rows = published("head_loss_time.json")["rows"]
    assert {row["num_vocab"] for row in rows} == {50_257, 128_256}
    assert max(row["num_tokens"] for row in rows) >= 1024
    for row in rows:
        assert row["cpu_time_ratio"] <= 1.15
        assert f"{row['cpu_time_ratio']:.2f}" in PAGE.read_text(encoding="utf-8")


def test_published_curves_lie_within_the_spread_of_seeds() -> None:
    # Runs that differ by any rounding drift apart: a nudge of one weight is the measure of that.
    rows = published("head_loss_curve.json")["rows"]
    assert [row["precision"] for row in rows] == ["float32", "bfloat16 autocast"]
    for row in rows:
        assert all(len(curve) == 200 for curves in row["curves"].values() for curve in curves)
        num_seeds, spread = len(row["curves"]["own"]), row["mean_spread_of_seeds"]
        assert num_seeds >= 5
        assert row["mean_difference"] < spread
        assert row["mean_difference"] < 2 * row["mean_difference_nudged"]
        assert row["mean_curve_difference"] < spread / num_seeds**0.5
        page = PAGE.read_text(encoding="utf-8")
        for key in ("mean_difference", "mean_difference_nudged", "mean_spread_of_seeds"):
            assert f" {row[key]:.3f} |" in page, key
    assert rows[0]["mean_difference"] < rows[0]["mean_spread_of_seeds"] / 10
