"""Choices of a micro-batch as documents: read back whole, refused by name, shown and drawn."""

from __future__ import annotations

from hf_pyao.plan.documents.microbatch import MicroBatchReport, MicroBatchRow
from hf_pyao.tools.report.kinds import view_of
from hf_pyao.tools.report.tables import markdown_of
from tests.helpers.documents import make_microbatch


def lengths() -> MicroBatchReport:
    rows = [
        MicroBatchRow(
            micro_batch=1,
            sequence_length=length,
            fits=length < 4096,
            peak_bytes=length * 2**20,
            step_ms=1.0 if length < 4096 else None,
            plan="planned",
        )
        for length in (64, 256, 1024, 2048, 4096)
    ]
    return make_microbatch(find="sequence", global_batch=None, rows=rows, chosen=rows[3])


def test_the_table_marks_what_was_chosen() -> None:
    (table,) = view_of(make_microbatch()).tables
    assert [row[0] for row in table.rows] == ["1", "2 (chosen)", "4", "8"]
    assert [row[6] for row in table.rows] == ["30.0", "25.0", "27.5", "–"]
    assert table.rows[-1][3:5] == ["14.00 at least", "–"]
    text = markdown_of(lengths())
    assert "| 2,048 (chosen) | 1 | yes |" in text
