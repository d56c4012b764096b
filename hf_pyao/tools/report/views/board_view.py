"""What the board shows: its table, why methods have no figures, and what a CPU cannot tell."""

from __future__ import annotations

from hf_pyao.plan.documents.bench import OK, REFERENCE
from hf_pyao.plan.documents.board import BoardReport, BoardRow, ratio
from hf_pyao.plan.documents.sweep import Spread
from hf_pyao.quantities import ABSENT, number
from hf_pyao.tools.report.views.view import Table, View

MIB = 2**20

ON_A_CPU = (
    "There was no device. Bytes are counted as torch allocates them; those that stand for the "
    "host's are not among them. Times say nothing about a GPU: copies take the time of compute."
)

SUMMARY = (
    "Every method on the same model, data and seed, each in a process of its own, in several "
    "rounds of shuffled order. The memory of a step is the most that is allocated during a "
    "forward and its backward above what was allocated before: saved tensors, logits, gradients "
    "and what is computed meanwhile. Gradients are compared with those of 'none'."
)


def board_view(report: BoardReport) -> View:
    """Return a row for each method that ran, the others with their reasons beneath."""
    measured = [row for row in report.rows if row.status == OK]
    device = str(report.device.get("name"))
    return View(
        title=report.title,
        summary=SUMMARY,
        tables=[board_table(report, sorted(measured, key=_order))],
        notes=[
            *(f"{row.method}: {row.status}. {row.reason}." for row in _not_measured(report)),
            *(
                f"{row.method}: another algorithm, whose step is no forward and backward and has "
                f"no gradients. Weights on the device: {row.device_weight_bytes / MIB:,.1f} MiB."
                for row in measured
                if row.device_weight_bytes is not None
            ),
            *([] if report.device.get("memory_gib") else [ON_A_CPU]),
        ],
        legend="Methods: " + "; ".join(f"{row.method}: {row.label}" for row in report.rows) + ".",
        provenance=report.provenance,
        measured_on=[device, f"rounds: {report.setup.get('num_rounds')}; mean, least and most"],
    )


def board_table(report: BoardReport, rows: list[BoardRow]) -> Table:
    """Return a table of *rows*: gradients, memory and time, against the reference."""
    base = report.row_of(REFERENCE)
    lines = []
    for row in rows:
        memory, time = row.step_peak_bytes, row.step_ms
        lines.append(
            [
                row.method,
                row.gradients,
                _memory(memory),
                _ratio(ratio(memory, base.step_peak_bytes if base else None)),
                _times(time),
                _ratio(ratio(time, base.step_ms if base else None)),
            ]
        )
    header = ["method", "gradients", "memory of a step, MiB", "of none", "step, ms", "of none"]
    return Table(header, lines, num_text_columns=2)


def _order(row: BoardRow) -> tuple[bool, float]:
    """The reference comes first, then whatever needs the least memory."""
    memory = row.step_peak_bytes
    return row.method != REFERENCE, float("inf") if memory is None else memory.mean


def _not_measured(report: BoardReport) -> list[BoardRow]:
    return [row for row in report.rows if row.status != OK]


def _memory(memory: Spread | None) -> str:
    if memory is None:
        return ABSENT
    least, most = (f"{value / MIB:,.1f}" for value in (memory.least, memory.most))
    return least if least == most else f"{least}–{most}"


def _times(time: Spread | None) -> str:
    if time is None:
        return ABSENT
    if time.num_figures == 1:
        return number(time.mean)
    return f"{number(time.mean)} ({number(time.least)}–{number(time.most)})"


def _ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}×"
