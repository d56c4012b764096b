"""Writes reports as Markdown with PNG plots beside it, or as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from hf_pyao.files import replace_file
from hf_pyao.report import markdown
from hf_pyao.report.bench_report import BenchReport, FactsReport
from hf_pyao.report.documents import Document
from hf_pyao.report.estimate_report import EstimateReport, estimate_notes, estimate_table
from hf_pyao.report.plots import figure_of, image_bytes, need_matplotlib
from hf_pyao.report.profile_report import Profile, profile_summary, profile_tables
from hf_pyao.report.run_report import RunReport
from hf_pyao.report.schema import ReportError
from hf_pyao.report.tables import (
    bench_table,
    fact_text,
    legend,
    markdown_of,
    provenance_line,
    reasons,
    run_tables,
)
from hf_pyao.text import echo, one_line


def write_page(
    documents: Sequence[Document], output: str | Path, *, with_plots: bool = True
) -> list[Path]:
    """Write *documents* to *output*; return the files written, that one first.

    ``.md`` gets one PNG for each plot beside it, ``.html`` holds all in one file.

    Raises:
        ReportError: the suffix is another one, matplotlib is missing, or a file cannot be written.
    """
    path = Path(output)
    if path.suffix not in (".md", ".html") or "\0" in str(output):
        raise ReportError(f"output {echo(str(output))}: expected a name that ends in .md or .html.")
    if with_plots and any(not isinstance(document, FactsReport) for document in documents):
        need_matplotlib()
    try:
        if path.suffix == ".html":
            page = html_page(documents, with_plots=with_plots)
            replace_file(path, page.encode("utf-8"))
            return [path]
        return _write_markdown(documents, path, with_plots=with_plots)
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"cannot write {echo(str(output))}: {reason}.") from error


def _write_markdown(documents: Sequence[Document], path: Path, *, with_plots: bool) -> list[Path]:
    written, parts = [path], []
    for index, document in enumerate(documents, start=1):
        text = markdown_of(document)
        image = _image(document, "png") if with_plots else None
        if image is not None:
            picture = path.with_name(f"{path.stem}-{index}.png")
            replace_file(picture, image)
            written.append(picture)
            heading, rest = text.split("\n\n", 1)
            link = f"![{markdown.escaped(document.title)}]({quote(os.fsencode(picture.name))})"
            text = f"{heading}\n\n{link}\n\n{rest}"
        parts.append(text)
    replace_file(path, "\n".join(parts).encode("utf-8"))
    return written


def html_page(documents: Sequence[Document], *, with_plots: bool = True) -> str:
    """Return one page that needs nothing beside it: no script, no network.

    Raises:
        ReportError: matplotlib is missing.
    """
    sections = "\n".join(_section(document, with_plots) for document in documents)
    title = _text(documents[0].title if len(documents) == 1 else "hf_pyao: reports")
    return _PAGE.format(title=title, style=_STYLE, sections=sections)


def _section(document: Document, with_plots: bool) -> str:
    parts = [f"<h2>{_text(document.title)}</h2>"]
    if isinstance(document, RunReport):
        parts.append(f"<p>{_text(document.description)}</p>")
    if isinstance(document, Profile):
        parts.append(f"<p>{_text(profile_summary(document))}</p>")
    image = _image(document, "svg") if with_plots else None
    if image is not None:
        # As an image of its own, so that the identifiers inside two plots cannot meet.
        data = base64.b64encode(image).decode("ascii")
        alt = _text(f"plot: {document.title}")
        parts.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">')
    parts += [_html_table(header, rows) for header, rows in _tables(document)]
    notes = reasons(document) if isinstance(document, BenchReport) else []
    if isinstance(document, EstimateReport):
        verdict, *notes = estimate_notes(document)
        parts.append(f"<p>{_text(verdict)}</p>")
    if notes:
        items = "".join(f"<li>{_text(note)}</li>" for note in notes)
        parts.append(f"<ul>{items}</ul>")
    if isinstance(document, BenchReport):
        parts.append(f'<p class="source">{_text(legend(document))}</p>')
    parts.append(f'<p class="source">{provenance_line(document, text=_text, command=_code)}</p>')
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _text(text: str) -> str:
    """Return what others wrote as the text of an element, or of a quoted attribute."""
    return html.escape(one_line(text), quote=True)


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _tables(document: Document) -> list[tuple[list[str], list[list[str]]]]:
    if isinstance(document, BenchReport):
        return [bench_table(document)]
    if isinstance(document, RunReport):
        return run_tables(document)
    if isinstance(document, EstimateReport):
        return [estimate_table(document)]
    if isinstance(document, Profile):
        return profile_tables(document)
    return [
        (["fact", "value"], [[name, fact_text(value)] for name, value in document.facts.items()])
    ]


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return (
        f'<div class="wide"><table>\n<thead>{line(header, "th")}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _image(document: Document, kind: str) -> bytes | None:
    if isinstance(document, FactsReport):
        return None
    figure = figure_of(document)
    return None if figure is None else image_bytes(figure, kind)


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #616e7c; --line: #d5dae0;
        --back: #ffffff; --band: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa5b1; --line: #3e4c59; --back: #171c21; --band: #20272e; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
       max-width: 74rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
img { max-width: 100%; background: #ffffff; border: 1px solid var(--line); border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tbody tr:nth-child(odd) { background: var(--band); }
.source, li { color: var(--soft); font-size: .85rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>hf_pyao</h1>
{sections}
</body>
</html>
"""
