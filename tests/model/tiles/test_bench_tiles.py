"""The recipe that measures tiles runs, and what it has measured keeps the promises."""

from __future__ import annotations

import json
from pathlib import Path

from bench import bench_tiles

RESULT = Path(__file__).parents[3] / "recipes" / "results" / "tiled_mlp.json"


def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    bench_tiles.main(["--smoke", "--rounds", "1", "--result", str(out)])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["mlp"] for row in rows] == ["llama", "gpt2", "opt"]
    assert all(row["num_tiles"] == 8 for row in rows)


def test_published_times_at_efficient_tiles_are_within_110_percent() -> None:
    """Of the MLP whole and one forward more, where a tile has the tokens that ``auto`` gives it."""
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    assert document["schema_version"] == 1
    assert document["provenance"]["versions"]["torch"]
    rows = [row for row in document["rows"] if row["tile_tokens"] >= 1024]
    assert {row["mlp"] for row in rows} == {"llama", "gpt2", "opt"}
    for row in rows:
        assert row["num_tiles"] == 8
        assert row["cpu_time_ratio_with_one_forward_more"] <= 1.10
        assert row["peak_bytes"]["tiled"] < row["peak_bytes"]["whole"] / 2
