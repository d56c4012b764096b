"""Writes README.md beside this script: page.md, with tables and numbers from the result files.

python recipes/experiments/write_page.py

In page.md a text in braces is one of ``page_values.known``. A table of a file's rows is a comment
that says which rows, the headings, and the cells of each row as formats of its keys; a cell without
its value is empty.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from experiments.page import bullets, paragraph, table_of
from experiments.page_values import known

PAGE, TEMPLATE = (Path(__file__).with_name(name) for name in ("README.md", "page.md"))
ROWS = re.compile(r"<!-- rows of (\w+)(?: with (\w+) = (.+))? -->")


def page() -> str:
    """Return the page."""
    values = known()
    blocks = TEMPLATE.read_text(encoding="utf-8").strip().split("\n\n")
    filled = "\n\n".join(_filled(block, values).strip() for block in blocks)
    return "\n\n".join(_wrapped(block) for block in re.split(r"\n{2,}", filled)) + "\n"


def _filled(block: str, values: Mapping[str, Any]) -> str:
    found = ROWS.match(block)
    if found is None:
        names_in_one_line = re.sub(r"\{[^}]*\}", lambda found: " ".join(found[0].split()), block)
        return names_in_one_line.format_map(values)
    name, key, wanted = found.groups()
    heads, cells = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()[1:]
    )
    rows = values["file"][name]["rows"]
    shown = [row for row in rows if key is None or str(row[key]) == wanted]
    return table_of(shown, *zip(heads, map(_cell, cells), strict=True))


def _cell(form: str) -> Any:
    """Return the function of a row that fills *form*; without its value it is empty."""
    field = re.match(r"{(\w+)", form)
    return lambda row: "" if field and row[field[1]] is None else form.format(**row)


def _wrapped(block: str) -> str:
    if block[0] in "|#!":
        return block
    if block.startswith("- "):
        return bullets([" ".join(item[2:].split()) for item in re.split(r"\n(?=- )", block)])
    return paragraph(block)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
