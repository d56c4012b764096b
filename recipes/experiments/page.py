"""The page's building blocks: tables, and where numbers are from. See ``write_page.py``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

WIDTH = 100


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the columns of numbers are set to the right."""
    is_number = [all(_looks_like_number(row[n]) for row in rows) for n in range(len(heads))]
    marks = ["--:" if numbers else "---" for numbers in is_number]
    lines = [heads, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
