"""Compare what hf_pyao predicts with figures that were published, one by one.

    python recipes/studies/compare_published.py
    python recipes/studies/compare_published.py --table peaks --model llama
    python recipes/studies/compare_published.py --result published.json
    python recipes/studies/compare_published.py --table gpus --result gpus.json
    python recipes/studies/compare_published.py --smoke

Nothing is trained, and no GPU is needed: steps of the models are recorded on fake tensors and
reckoned with, as `pyao estimate` does. The tables:

    saved_bytes   what autograd saves per layer, by kind of tensor and by sub-module
    peaks         peak memory over the micro-batch, and the largest that 12 GiB hold
    overheads     step time over keeping everything, on four machines
    paper         memory figures in the text of the PyAO paper
    alst          ALST's sequence lengths for Llama-8B on one H200
    gpus          peaks, lengths and speeds that others measured on their GPUs; if asked for

Each row has the published figure, ours, and the difference. Where it is larger than the table
allows, the reason stands below, and where it can be told in numbers, what ours would be without
that reason. No figure is fitted to what was published, but for one constant in `paper`.
`hf_pyao/tools/estimate/PUBLISHED.md` discusses the rows. With ``--result`` and all tables but
``gpus``, or that alone, its parts are written anew that are made of these.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import with_part, write_result
from studies.published_gpus import gpus, gpus_page
from studies.published_peaks import peaks
from studies.published_rows import MODELS, TRACE, Row, Steps
from studies.published_runs import alst, alst_tensors, paper
from studies.published_saved import saved_bytes
from studies.published_times import overheads, window_overheads

SCHEMA_VERSION = 1
Table = Callable[[Steps, Sequence[str]], Iterator[Row]]
TABLES: dict[str, Table] = {
    "saved_bytes": saved_bytes,
    "peaks": peaks,
    "overheads": overheads,
    "paper": paper,
    "alst": alst,
}
GPUS = "gpus"
"""A table with a result file of its own."""
ALLOWED = {
    "saved_bytes": "1 %, or half of the last published digit",
    "peaks": "3 %; micro-batches with the own loss: equal",
    "overheads": "2 points; times 3 %",
    "paper": "5 %; shares 2 points",
    "alst": "10 %",
}
"""What each table allows, in words."""
REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "hf_pyao" / "tools" / "estimate" / "PUBLISHED.md"
NOT_COMPARED = (
    "fused pointwise kernels (peaks): hf_pyao has none",
    "int8 (overheads): the predictor does not know what encoding and decoding take yet; peaks with "
    "int8 are those without",
    "plan (overheads): plans that are computed are not built yet",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write the rows if asked to."""
    args = _parse(argv)
    torch.set_num_threads(1)
    steps = Steps()
    found: dict[str, list[Row]] = {}
    for name in args.table:
        rows = (TABLES | {GPUS: gpus})[name](steps, args.model)
        shown = tqdm(rows, desc=name, unit=" figures", file=sys.stderr, disable=None, leave=False)
        found[name] = list(shown)
        _print_table(name, found[name])
    print("not compared:", *(f"- {text}" for text in NOT_COMPARED), sep="\n")
    if args.result is not None:
        details: dict[str, Any] = {}
        if "overheads" in found:
            details["window_overheads_percent"] = window_overheads(steps, args.model)
        if "alst" in found:
            details["alst"] = alst_tensors(steps)
        write_result(
            args.result,
            kind="published_gpus" if list(found) == [GPUS] else "published_figures",
            schema_version=SCHEMA_VERSION,
            is_measured=False,
            trace=TRACE,
            not_compared=NOT_COMPARED,
            tables={name: [_as_dict(row) for row in rows] for name, rows in found.items()},
            **details,
        )
        if list(found) in ([GPUS], list(TABLES)):
            PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


def page_with(page: str, found: dict[str, list[Row]]) -> str:
    """Return *page* with the parts that are made of rows, by table."""
    from hf_pyao.plan.documents.provenance import collect_provenance

    commit = f"Commit `{str(collect_provenance().commit)[:12]}`."
    if GPUS in found:
        link = "[result file](../../../recipes/results/published_gpus.json)"
        parts = {GPUS: f"{gpus_page(found[GPUS])}\n\n{commit[:-1]}, {link}."}
    else:
        lines = ["| table | figures | within | allowed |", "|---|--:|--:|---|"]
        for name, rows in found.items():
            within = sum(row.is_within for row in rows)
            lines.append(f"| `{name}` | {len(rows)} | {within} | {ALLOWED[name]} |")
        parts = {"tables": "\n".join(lines), "commit": commit}
    for name, part in parts.items():
        page = with_part(page, f"<!-- {name} -->", f"<!-- end of {name} -->", part)
    return page


def _print_table(name: str, rows: Sequence[Row]) -> None:
    print(f"\n## {name}")
    source, notes = "", []
    for row in rows:
        if row.source != source:
            source = row.source
            print(f"\n{source}\n\n| figure | published | ours | difference |\n|---|--:|--:|--:|")
        mark = ""
        if not row.is_within:
            text = row.explanation or "unexplained"
            if text not in notes:
                notes.append(text)
            mark = f" [{notes.index(text) + 1}]"
            if row.without is not None:
                mark += f" without that {row.without:.4g}"
        print(
            f"| {row.figure} | {row.published:g} {row.unit} | {row.ours:.4g} {row.unit} "
            f"| {difference(row)}{mark} |"
        )
    within = sum(row.is_within for row in rows)
    print(f"\n{within} of {len(rows)} within what is allowed")
    for number, text in enumerate(notes, 1):
        print(f"[{number}] {text}")


def difference(row: Row) -> str:
    """Return the difference as tables show it."""
    if row.unit == "%":
        return f"{row.difference:+.1f} points"
    return f"{100 * row.difference:+.1f} %"


def _as_dict(row: Row) -> dict[str, Any]:
    shown = dataclasses.asdict(row)
    if row.is_within:
        shown["explanation"], shown["without"] = "", None
    return {**shown, "difference": row.difference, "is_within": row.is_within}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table",
        nargs="+",
        choices=[*TABLES, GPUS],
        default=list(TABLES),
        metavar="NAME",
        help=f"which tables: {', '.join(TABLES)} (default: all but the last)",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        help="which of the PyAO paper's models (default: all; alst has its own)",
    )
    parser.add_argument("--result", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--smoke", action="store_true", help="one table of one model: does it run?")
    args = parser.parse_args(argv)
    if args.smoke:
        args.table, args.model = ["saved_bytes"], ["gpt2"]
    return args


if __name__ == "__main__":
    main()
