"""The board: every method beside ours, measured in several rounds, each in a process of its own.

    python recipes/bench/board.py --model llama:hidden_size=1024,num_hidden_layers=8 --micro-batch 8
    python recipes/bench/board.py --smoke --device cpu
    python recipes/bench/board.py --show recipes/results/board_cpu.json

Beside the methods of `pyao bench` the board has more of others (`board_peers.py`). It compares the
values of gradients, and counts the memory of a step, on a CPU too. What others need is not
installed with hf_pyao: a method whose package is missing says so in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("hf_pyao") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Measuring processes inherit it, and find the methods' module there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.board_peers import PEERS
from bench.board_report import BoardEntry, BoardReport, board_view, rows_of
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.bench import FAILED, OK, REFERENCE
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.schema import to_plain, write_json
from hf_pyao.text import one_line, say
from hf_pyao.tools.bench.arguments import default_output, epilog, work_of
from hf_pyao.tools.bench.harness import Progress, describe_machine, describe_row, silent
from hf_pyao.tools.bench.methods import find_method, known_methods
from hf_pyao.tools.bench.processes import probe, run_trials
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.option_table import add_options
from hf_pyao.tools.report.terminal import show_view

PROGRAM = "python recipes/bench/board.py"
SERVER = "bench.board_trial:serve"
SMOKE_METHODS = ("none", "checkpoint", "sac", "save-on-cpu", "pyao-window", "trl-streams")
INTERRUPTED = 130
"""Exit status of a command that was interrupted."""

NOT_ON_THE_BOARD = frozenset({"pyao-single-stream", "pyao-one-copy-stream", "pyao-off"})
"""Methods that show how hf_pyao works inside; nobody would train with them."""

OURS = (
    "pyao:policy=all,window=layer,keep_last_layers=0",
    "pyao:policy=all,window=layer,keep_last_layers=0,head_loss=chunked",
    "pyao:policy=all,checkpoint_every=1,head_loss=chunked,mlp_tiles=4",
)
"""Configurations that the board has besides the named methods: no layer kept; the loss without
logits; the least memory."""


def board_methods() -> list[str]:
    """Return the methods of the board, the reference first."""
    known = (*known_methods(), *PEERS)
    others = [name for name in known if name != REFERENCE and name not in NOT_ON_THE_BOARD]
    return [REFERENCE, *others, *OURS]


def harness_name(name: str) -> str:
    """Return what the harness calls the board's method *name*.

    Raises:
        ConfigError: there is none.
    """
    if name in PEERS:
        name = f"bench.board_peers:{name.replace('-', '_')}"
    return find_method(name).name


def run_board(
    setup: BenchSetup,
    methods: Sequence[str],
    *,
    micro_batch: int,
    num_rounds: int,
    output: Path | None = None,
    timeout_s: float = 600.0,
    progress: Progress = silent,
) -> BoardReport:
    """Measure each of *methods* once in each round and return the report.

    Rounds differ in the order, which is shuffled with the setup's seed, so that a machine that
    slows down favours nobody. A method that cannot run here runs in the first round alone. An
    interrupt ends the board early: the report then has the entries that were done.

    Args:
        setup: what they have in common; it must keep gradients until the step ends.
        methods: names on the board; the reference is added where it is missing.
        micro_batch: sequences in a micro-batch.
        num_rounds: how often each is measured.
        output: where the report is written, anew after each entry; None: nowhere.
        timeout_s: most time for an entry.
        progress: told of each entry.

    Raises:
        ConfigError: a method is unknown, or the device or the model cannot be had.
        ReportError: *output* cannot be written.
    """
    harness_names = {name: harness_name(name) for name in (REFERENCE, *methods)}
    device, link, _ = probe(setup.device, with_speeds=True)
    progress(describe_machine(device, link))
    entries: list[BoardEntry] = []
    report = BoardReport(
        title=f"{setup.describe(micro_batch)}, {num_rounds} round{'s' * (num_rounds > 1)}",
        setup={**to_plain(setup), "micro_batch": micro_batch, "num_rounds": num_rounds},
        device=device,
        link=link,
        provenance=collect_provenance(),
        rows=[],
        entries=[],
    )
    running, order = list(harness_names), random.Random(setup.seed)
    try:
        for number in range(num_rounds):
            order.shuffle(running)
            for position, name in enumerate(running):
                trial = Trial(method=harness_names[name], micro_batch=micro_batch)
                (row,) = run_trials(setup, [trial], timeout_s=timeout_s, server=SERVER)
                row = dataclasses.replace(row, method=name, label=PEERS.get(name, row.label))
                entries.append(BoardEntry(round=number, position=position, row=row))
                rows = rows_of(entries, [*harness_names])
                report = dataclasses.replace(report, rows=rows, entries=list(entries))
                if output is not None:
                    write_json(output, report)
                count = f"round {number + 1}/{num_rounds}, {position + 1}/{len(running)}"
                progress(f"[{count}] {name}: {describe_row(row)}")
            ran = {entry.row.method for entry in entries if entry.row.status == OK}
            running = [name for name in running if name in ran]
    except KeyboardInterrupt:
        progress("interrupted: the report has what was done")
        return dataclasses.replace(report, is_complete=False)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or show a file; return the exit status.

    1: a method failed; 2: a setting cannot be; 130: interrupted, with what was done in the file.
    """
    args = make_parser().parse_args(argv)
    try:
        if args.show is not None:
            show_view(board_view(BoardReport.from_json_file(args.show)))
            return 0
        return _measure(args)
    except PyAOError as error:
        print(f"board.py: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: the options of ``pyao bench``, and two more."""
    peers = "\n".join(f"  {name:<22} {label}" for name, label in PEERS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=f"{epilog(PROGRAM)}\nmethods of others, on the board alone\n{peers}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "bench")
    parser.add_argument("--rounds", type=int, help="(default: 3; 1 with --smoke)", metavar="N")
    parser.add_argument("--show", metavar="FILE.json", help="measure nothing: show this board")
    return parser


def _measure(args: argparse.Namespace) -> int:
    if args.find_largest or args.gradients != "keep" or (args.rounds or 1) < 1:
        raise PyAOError(
            "the board compares gradients at one micro-batch, in 1 round or more: --find-largest, "
            "--gradients release and --rounds below 1 cannot be."
        )
    methods = args.methods or (SMOKE_METHODS if args.smoke else board_methods())
    args.methods = [harness_name(name) for name in methods]
    setup, trials = work_of(args)
    output = args.output or default_output("board", setup.model.name, setup.dtype)
    report = run_board(
        setup,
        methods,
        micro_batch=trials[0].micro_batch,
        num_rounds=args.rounds or (1 if args.smoke else 3),
        output=output,
        timeout_s=args.timeout,
        progress=lambda line: say(one_line(line)),
    )
    show_view(board_view(report))
    say(f"written to {one_line(str(output))}")
    if not report.is_complete:
        return INTERRUPTED
    return 0 if all(row.status != FAILED for row in report.rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
