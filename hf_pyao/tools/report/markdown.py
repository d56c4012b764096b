"""Text of others as Markdown: shown as it is, never taken for markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_pyao.text import one_line

_MARKUP = re.compile(r"[\\`*\[\]|~]")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[#>+=-]))")
"""Where a heading, a quotation, a line or a list would begin."""


def escaped(text: str) -> str:
    """Return *text* as one line that Markdown shows as it is, within a line or a table's cell."""
    text = _MARKUP.sub(r"\\\g<0>", one_line(text))
    text = _ENTITY.sub("&amp;", text).replace("<", "&lt;")
    return _EMPHASIS.sub(r"\\_", text)


def paragraph(text: str) -> str:
    """Return *text* as :func:`escaped`, also where a heading or a list could begin."""
    return _BLOCK.sub(r"\1\\", escaped(text))


def code(text: str) -> str:
    """Return *text* as a span of code."""
    text = one_line(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    if not longest:
        return f"`{text}`"
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 1
) -> str:
    """Return a Markdown table; columns after the first *num_text_columns* are right-aligned."""
    rule = ["---" if i < num_text_columns else "--:" for i in range(len(header))]
    lines = [[escaped(cell) for cell in line] for line in (header, *rows)]
    lines.insert(1, rule)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
