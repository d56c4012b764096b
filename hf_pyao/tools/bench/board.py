"""The board: every method beside ours, measured in several rounds, each in a process of its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from hf_pyao.plan.documents.bench import OK, REFERENCE
from hf_pyao.plan.documents.board import BoardEntry, BoardReport, BoardRow, rows_of
from hf_pyao.plan.documents.provenance import Provenance, collect_provenance
from hf_pyao.plan.documents.schema import to_plain, write_json
from hf_pyao.tools.bench.harness import Progress, describe_machine, describe_row, silent
from hf_pyao.tools.bench.methods import find_method
from hf_pyao.tools.bench.processes import probe, run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial

NOT_ON_THE_BOARD = frozenset({"pyao-single-stream", "pyao-one-copy-stream", "pyao-off"})
"""Methods that show how hf_pyao works inside; nobody would train with them."""

OURS = (
    "pyao:policy=all,window=layer,keep_last_layers=0",
    "pyao:policy=all,window=layer,keep_last_layers=0,head_loss=chunked",
    "pyao:policy=all,checkpoint_every=1,head_loss=chunked,mlp_tiles=4",
)
"""Configurations that the board has besides the named methods: no layer kept; the loss without
logits; the least memory."""


def board_methods(known: Sequence[str]) -> list[str]:
    """Return the methods of the board, of those *known*, the reference first."""
    others = [name for name in known if name != REFERENCE and name not in NOT_ON_THE_BOARD]
    return [REFERENCE, *others, *OURS]


def run_board(
    setup: BenchSetup,
    methods: Sequence[str],
    *,
    micro_batch: int,
    num_rounds: int = 3,
    output: Path | None = None,
    timeout_s: float = 600.0,
    progress: Progress = silent,
    provenance: Provenance | None = None,
) -> BoardReport:
    """Measure each of *methods* once in each round and return the report.

    Rounds differ in the order, which is shuffled with the setup's seed, so that a machine that
    slows down favours nobody. A method that cannot run here runs in the first round alone. An
    interrupt ends the board early: the report then has the entries that were done.

    Args:
        setup: what they have in common; it must keep gradients until the step ends.
        methods: names; the reference is added where it is missing.
        micro_batch: sequences in a micro-batch.
        num_rounds: how often each is measured.
        output: where the report is written, anew after each entry; None: nowhere.
        timeout_s: most time for an entry.
        progress: told of each entry.
        provenance: where the figures come from; None: this process's command line.

    Raises:
        ConfigError: a method is unknown, or the device or the model cannot be had.
        ReportError: *output* cannot be written.
    """
    names = list(dict.fromkeys([REFERENCE, *methods]))
    for name in names:
        find_method(name)
    device, link, _ = probe(setup.device, with_speeds=True)
    progress(describe_machine(device, link))
    entries: list[BoardEntry] = []
    report = BoardReport(
        title=f"{setup.describe(micro_batch)}, {num_rounds} round{'s' * (num_rounds > 1)}",
        setup={**to_plain(setup), "micro_batch": micro_batch, "num_rounds": num_rounds},
        device=device,
        link=link,
        provenance=provenance or collect_provenance(),
        rows=[],
        entries=[],
    )
    running, order = list(names), random.Random(setup.seed)
    try:
        for number in range(num_rounds):
            order.shuffle(running)
            for position, name in enumerate(running):
                trial = Trial(method=name, micro_batch=micro_batch, compares_values=True)
                (row,) = run_trials(setup, [trial], timeout_s=timeout_s)
                entries.append(BoardEntry(round=number, position=position, row=row))
                rows = rows_of(entries, names)
                report = _with(report, rows, entries)
                if output is not None:
                    write_json(output, report)
                count = f"round {number + 1}/{num_rounds}, {position + 1}/{len(running)}"
                progress(f"[{count}] {name}: {describe_row(row)}")
            running = [name for name in running if _ran(entries, name)]
    except KeyboardInterrupt:
        progress("interrupted: the report has what was done")
        return dataclasses.replace(report, is_complete=False)
    return report


def _with(report: BoardReport, rows: list[BoardRow], entries: list[BoardEntry]) -> BoardReport:
    return dataclasses.replace(report, rows=rows, entries=list(entries))


def _ran(entries: Sequence[BoardEntry], method: str) -> bool:
    return any(entry.row.method == method and entry.row.status == OK for entry in entries)
