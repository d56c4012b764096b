"""The JSON file that a recipe leaves: its figures, and where they come from; its part of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(path: Path | str, *, kind: str, schema_version: int, **content: Any) -> None:
    """Write *content* to *path*, behind its kind, version and provenance; say so.

    Args:
        path: the file; folders on the way to it are made.
        kind: what the file holds, one word or two.
        schema_version: of *content*; raised whenever its keys change their meaning.
        **content: rows, and what they depend on; dataclasses are written as dictionaries.
    """
    # Not at the top: `bench/bench_hooks.py` runs with earlier checkouts too.
    from hf_pyao.plan.documents.provenance import collect_provenance
    from hf_pyao.plan.documents.schema import to_plain

    document = {
        "schema_version": schema_version,
        "kind": kind,
        "provenance": collect_provenance(),
        **content,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_plain(document), indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """Return *page* with *part* between its lines *begin* and *end*.

    Raises:
        ValueError: *page* lacks one of them.
    """
    head, found, rest = page.partition(f"{begin}\n")
    _, ending, tail = rest.partition(f"{end}\n")
    if not ending:
        raise ValueError(
            f"the page has no lines {begin!r} and {end!r}, in this order: put them where the part "
            "is to stand."
        )
    return f"{head}{found}{part}\n{ending}{tail}"
