"""Documents on a terminal: plain text in its width."""

from __future__ import annotations

import shutil
import sys
import textwrap
from itertools import zip_longest

from hf_pyao.text import one_line, say
from hf_pyao.tools.report.kinds import Document, view_of
from hf_pyao.tools.report.tables import markdown_of_view, provenance_line
from hf_pyao.tools.report.views.view import Table, View


def show(document: Document) -> None:
    """Print *document*: on a terminal as text in its width, elsewhere as Markdown."""
    show_view(view_of(document))


def show_view(view: View) -> None:
    """Print what a document shows, as :func:`show` does."""
    if sys.stdout.isatty():
        say(text_of_view(view, shutil.get_terminal_size().columns))
    else:
        say(markdown_of_view(view))


def text_of_view(view: View, width: int) -> str:
    """Return what a document shows as text in *width* columns."""

    def fill(text: str, indent: str = "") -> str:
        text = one_line(text)
        return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)

    parts = [
        *map(fill, (view.title, view.summary)),
        *(text_of_table(table, width) for table in view.tables),
        fill(view.conclusion),
        "\n".join(fill(f"- {note}", "  ") for note in view.notes),
        *map(fill, (view.legend, provenance_line(view, text=one_line, command=one_line))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def text_of_table(table: Table, width: int) -> str:
    """Return a table with the columns that *width* has room for, and the names of the others.

    Names in the first columns are wrapped to a third of *width*; figures are never.
    """
    sizes: dict[int, int] = {}
    for number, (name, *cells) in enumerate(zip(table.header, *table.rows, strict=True)):
        size = max(map(len, (*name.split(), *cells)))
        size = min(size, width // 3) if number < table.num_text_columns else size
        if sum(sizes.values()) + 2 * len(sizes) + size <= width:
            sizes[number] = size
    left_out = [name for number, name in enumerate(table.header) if number not in sizes]
    lines = []
    for row in (table.header, *table.rows):
        cells = [textwrap.wrap(one_line(row[number]), size) for number, size in sizes.items()]
        for parts in zip_longest(*cells, fillvalue=""):
            line = [
                part.ljust(size) if number < table.num_text_columns else part.rjust(size)
                for part, (number, size) in zip(parts, sizes.items(), strict=True)
            ]
            lines.append("  ".join(line).rstrip())
        if row is table.header:
            lines.append("-" * len(max(lines, key=len)))
    if left_out:
        left = f"Left out of the table, for {width} columns: {'; '.join(left_out)}."
        lines += ["", *textwrap.wrap(left, width)]
    return "\n".join(lines)
