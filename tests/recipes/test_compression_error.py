"""What the study of lossy codecs has found is what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULT = REPOSITORY / "recipes" / "results" / "compression_error.json"
PAGE = REPOSITORY / "hf_pyao" / "engine" / "codecs" / "COMPRESSION.md"

LOSSY = {"int8", "int8_group", "int8_tensor", "fp8", "int4"}
LOSSLESS = {"identity", "bitmask", "narrow"}


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def check_controls(summary: dict[str, Any], models: set[str]) -> None:
    """Check what must hold for the exact codecs, whatever the sizes."""
    gradients = [row for row in summary["gradients"] if row["codec"] in LOSSY | LOSSLESS]
    assert {row["model"] for row in gradients} == models
    assert {row["codec"] for row in gradients} == LOSSY | LOSSLESS
    for row in gradients:
        assert row["is_loss_equal"], row  # a codec has no part in forward
        if row["codec"] in LOSSLESS:
            assert row["is_zero"] and row["worst_layer_relative_error"] == 0, row
            assert row["cosine"] == row["worst_layer_cosine"] == 1, row
        elif row["slots"] == "all":
            assert not row["is_zero"] and row["link_ratio"] < 1, row
    trained = [row for row in summary["curves"] if row["codec"] in LOSSY | LOSSLESS]
    for row in trained:
        assert row["is_bit_identical"] == (row["codec"] in LOSSLESS), row
        if row["codec"] in LOSSLESS:
            assert row["curve_difference"] == row["largest_held_out_difference"] == 0
    assert {(row["model"], row["precision"]) for row in trained} == {
        (model, precision) for model in models for precision in ("fp32", "bf16")
    }


def test_the_published_study_is_whole() -> None:
    document = read(RESULT)
    assert document["provenance"]["commit"]
    assert len(document["runs"]) == 222
    assert len({run["seed"] for run in document["runs"].values()}) == 3
    check_controls(document["summary"], {"opt", "gpt2", "llama"})
    assert RESULT.with_suffix(".png").is_file()
    assert "../../recipes/results/compression_error.png" in PAGE.read_text(encoding="utf-8")


def test_the_recommendation_follows_from_the_figures() -> None:
    summary = read(RESULT)["summary"]
    error = {
        (row["model"], row["precision"], row["codec"]): row["relative_error"]
        for row in summary["gradients"]
        if row["slots"] == "all"
    }
    spread = {
        (row["model"], row["precision"]): row["held_out_spread"]
        for row in summary["curves"]
        if row["codec"] == "none"
    }
    for precision in ("fp32", "bf16"):
        for model in ("gpt2", "llama"):  # without a ReLU: int8, a scale for each row
            best = min(LOSSY, key=lambda codec: error[model, precision, codec])
            assert best == "int8"
            assert error[model, precision, "int8"] < 1.2 * error[model, "bf16", "bf16 itself"]
        assert error["opt", precision, "fp8"] < error["opt", precision, "int8"] / 3
        for model in ("opt", "gpt2", "llama"):  # not one scale for the tensor, and not four bits
            assert error[model, precision, "int8_tensor"] > 1.3 * error[model, precision, "int8"]
            assert error[model, precision, "int4"] > 0.05
    for row in summary["curves"]:
        if row["codec"] in LOSSY - {"int4"}:
            limit = 0.6 * spread[row["model"], row["precision"]]
            assert abs(row["held_out_difference"]) < limit, row
    for row in summary["overflow"]:
        if row["codec"] == "int8":
            none = next(
                other
                for other in summary["overflow"]
                if other["codec"] == "none" and other["model"] == row["model"]
            )
            assert row["num_overflows"] == none["num_overflows"]
            assert row["first_overflow_exponent"] == none["first_overflow_exponent"]


def test_the_page_has_the_codecs_times() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = read(RESULT.with_name("codec_cost.json"))["rows"]
    assert LOSSY | {"bitmask", "narrow"} == {row["codec"] for row in rows}
    for row in rows:
        assert f"| {row['tensor']} | {row['codec']} | {row['payload_ratio']:.3f} |" in page
        assert f"| {row['encode_gib_per_s']:.2f} | {row['decode_gib_per_s']:.2f} |" in page
