"""The page's building blocks: tables, and where numbers are from. See ``write_page.py``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

WIDTH = 100

Cell = Callable[[dict[str, Any]], str]
"""Returns a cell's text of a row."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the columns of numbers are set to the right."""
    is_number = [all(_looks_like_number(row[n]) for row in rows) for n in range(len(heads))]
    marks = ["--:" if numbers else "---" for numbers in is_number]
    lines = [heads, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_of(rows: Iterable[dict[str, Any]], *columns: tuple[str, str | Cell]) -> str:
    """Return a table of a result file's rows.

    Args:
        rows: a line each.
        columns: heading, and the cell: a format with the row's keys, or a function of the row.
    """
    cells = [[_text(cell, row) for _, cell in columns] for row in rows]
    return table([head for head, _ in columns], cells)


def pivot(
    rows: Iterable[dict[str, Any]],
    lines: Mapping[str, str | Cell],
    column: str | Cell,
    cell: str | Cell,
    columns: Iterable[str] = (),
) -> str:
    """Return a table in which several rows of a result file share a line.

    Args:
        rows: a cell each, or several with " / " between them.
        lines: heading of a line's first cells -> what they are of a row: a format with the row's
            keys, or a function of the row.
        column: the heading of a row's column, likewise.
        cell: what stands there, likewise.
        columns: which, in their order; else all.
    """
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in rows:
        of_line = found.setdefault(tuple(_text(each, row) for each in lines.values()), {})
        of_line.setdefault(_text(column, row), []).append(_text(cell, row))
    heads = list(columns) or list(dict.fromkeys(head for line in found.values() for head in line))
    return table(
        [*lines, *heads],
        [
            [*firsts, *(" / ".join(line.get(head, ["–"])) for head in heads)]
            for firsts, line in found.items()
        ],
    )


def _text(cell: str | Cell, row: dict[str, Any]) -> str:
    return cell.format(**row) if isinstance(cell, str) else cell(row)


def paper(cell: str) -> Cell:
    """Return the format *cell* for rows that have a published value; others are left empty."""
    return lambda row: "" if row["published"] is None else cell.format(**row)


def _looks_like_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789+-*~("


def paragraph(text: str) -> str:
    """Return *text* in lines of the page's width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False)


def bullets(texts: Sequence[str]) -> str:
    """Return a list of *texts*."""
    return "\n".join(
        textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for text in texts
    )


def source(document: dict[str, Any]) -> str:
    """Return the line on where *document*'s numbers are from."""
    provenance = document["provenance"]
    host, versions = provenance["host"], provenance["versions"]
    commit = str(provenance["commit"])[:12] + ("-dirty" if provenance["is_dirty"] else "")
    folder = "../results/experiments"
    name = f"{document['name']}_{document['mode']}"
    machine = f"{host['num_cores']} cores of an {host['processor']}"
    # Older files name a script of the experiment's own.
    command = provenance["command"].replace(f"{document['name']}.py", f"run.py {document['name']}")
    return paragraph(
        f"*`python recipes/experiments/{command}`, mode {document['mode']}, commit "
        f"`{commit}`, {machine}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}: [result file]({folder}/{name}.json).*"
    )
