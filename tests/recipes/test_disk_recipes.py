"""The recipes of the disk run, and their result files say what the pages say."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

import disk_activations
import disk_tables
import disk_tier
from tests.recipes.conftest import REPOSITORY

RESULTS = REPOSITORY / "recipes" / "results"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk needs Linux")


@pytest.mark.thorough
def test_smoke_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="the recipe trains adapters")
    result = tmp_path / "result.json"
    assert disk_tier.main(["--folder", str(tmp_path / "disk"), "--smoke", "-o", str(result)]) == 0
    assert "equal" in capsys.readouterr().out
    found = json.loads(result.read_text())
    assert found["bits_are_equal"]
    assert found["limited"]["read_bytes_per_step"] > 0


@pytest.mark.thorough
def test_smoke_of_saved_tensors(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    given = ["--disk_path", str(tmp_path / "disk"), "--smoke", "--result", str(result)]
    assert disk_activations.main(given) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert row["has_equal_bits"]
    assert row["disk"]["written_bytes"] > 0


def test_the_result_of_weights_is_what_it_must_be() -> None:
    found: dict[str, Any] = json.loads((RESULTS / "disk_tier_weights.json").read_text())
    limited = found["limited"]
    assert found["bits_are_equal"]
    assert limited["losses"] == found["resident"]["losses"]
    assert found["weights_bytes"] >= 3 * found["limit_bytes"]
    assert found["has_cgroup"]
    assert found["charged_peak_bytes"] <= found["limit_bytes"]
    assert found["killed"] == 0
    assert limited["is_direct"]
    assert limited["cached_bytes_of_file"] <= 2**20, "no more than its header"
    assert limited["staging_bytes"] <= 512 * 2**20
    shares = [each["ring_gib_per_s"] / each["raw_gib_per_s"] for each in limited["rounds"]]
    assert statistics.median(shares) == pytest.approx(found["share_of_raw_speed"])


def test_the_result_of_saved_tensors_has_equal_bits_and_direct_reads() -> None:
    rows = json.loads((RESULTS / "disk_activations.json").read_text())["rows"]
    assert {row["hidden_size"] for row in rows} == {1024, 128}
    for row in rows:
        assert row["has_equal_bits"]
        assert row["disk"]["is_direct"]


def test_the_pages_have_the_results() -> None:
    for page, text in disk_tables.pages().items():
        assert page.read_text() == text, "run python recipes/disk_tables.py"
        assert "<!-- end of" in text
