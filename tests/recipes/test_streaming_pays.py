"""The study of streamed weights: what was published beside what the clock says."""

from __future__ import annotations

import pytest

from studies.streaming_pays import overlaps


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
