"""What the measurements of parts share: their options, ways in turns, a table, a result file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all have; *rounds*: how many by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="of each way, in turns")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    return parser


def times_in_turns(
    ways: Mapping[str, Callable[[], object]], num_rounds: int, num_warmup: int
) -> dict[str, dict[str, Any]]:
    """Run *ways* in turns; return the ``StepTimes`` of each, by clock (:data:`CLOCKS`)."""
    from hf_pyao.plan.documents.bench import StepTimes

    times_ms: dict[str, dict[str, list[float]]] = {
        way: {clock: [] for clock in CLOCKS} for way in ways
    }
    for turn in range(num_warmup + num_rounds):
        for way in list(ways) if turn % 2 else reversed(list(ways)):
            began = {clock: now() for clock, now in CLOCKS.items()}
            ways[way]()
            for clock, now in CLOCKS.items():
                times_ms[way][clock].append((now() - began[clock]) * 1e3)
    return {
        way: {clock: StepTimes.of(each[num_warmup:], num_warmup) for clock, each in found.items()}
        for way, found in times_ms.items()
    }


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print *rows* as a table; *columns*: heading -> a format with a row's keys."""
    cells = [list(columns), *([form.format(**row) for form in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))


def write(arguments: argparse.Namespace, kind: str, schema_version: int, **content: Any) -> None:
    """Write the result file, if one is asked for."""
    if arguments.result is not None:
        config = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name != "result"
        }
        write_result(
            arguments.result, kind=kind, schema_version=schema_version, config=config, **content
        )
