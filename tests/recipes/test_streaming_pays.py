"""The study of streamed weights: what was published beside what the clock says."""

from __future__ import annotations

import pytest

from studies.streaming_pays import link_of, overlaps, pays


def test_the_overlap_table_at_what_its_own_figures_imply() -> None:
    rows = list(overlaps())
    implied = [row for row in rows if row.assumed.startswith("1 byte")]
    assert [row.model for row in implied] == ["OPT-1.3B", "OPT-6.7B", "OPT-30B"]
    for row in implied:
        assert row.block_mb == pytest.approx(row.published_block_mb, rel=0.08)
        assert row.upload_ms == pytest.approx(row.published_upload_ms, rel=0.12)
    for row in rows:
        assert row.upload_ms < row.compute_ms
        assert row.hidden == pytest.approx(1.0)  # published: 100 %
        assert row.pass_ms == pytest.approx(
            row.compute_ms * {"1": 24, "6": 32, "3": 48}[row.model[4]]
        )


@pytest.mark.thorough
def test_a_faster_link_and_more_tokens_cost_less() -> None:
    rows = [row for row in pays("llama:tiny", (64, 128)) if not row.checkpointing]
    overhead = {(row.tokens, row.link_gb_per_s): row.streamed_ms / row.resident_ms for row in rows}
    assert overhead[64, 12.5] >= overhead[64, 50.0] >= 1
    assert overhead[128, 12.5] <= overhead[64, 12.5]
    assert link_of(25.0).h2d_gib_per_s == pytest.approx(25e9 / 2**30)
