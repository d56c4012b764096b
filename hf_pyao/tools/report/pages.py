"""Writes reports as Markdown with PNG plots beside it, or as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from hf_pyao.files import replace_file
from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.text import echo, one_line
from hf_pyao.tools.report.chrome_trace import write_trace
from hf_pyao.tools.report.kinds import Document, figure_of, view_of
from hf_pyao.tools.report.plots.look import image_bytes, need_matplotlib
from hf_pyao.tools.report.tables import markdown_of, provenance_line
from hf_pyao.tools.report.views.view import Table


def write_page(
    documents: Sequence[Document],
    output: str | Path,
    *,
    with_plots: bool = True,
    snapshots: Sequence[bytes] = (),
) -> list[Path]:
    """Write *documents* to *output*; return the files written, that one first.

    ``.md`` gets one PNG for each plot beside it, ``.html`` holds all in one file. ``.json`` gets a
    Chrome trace, where all documents hold spans. Memory *snapshots* are ``.pickle`` files beside a
    page.

    Raises:
        ReportError: the suffix is another one, matplotlib is missing, or a file cannot be written.
    """
    path = Path(output)
    if path.suffix not in (".md", ".html", ".json") or "\0" in str(output):
        raise ReportError(
            f"output {echo(str(output))}: expected a name that ends in .md or .html, or in .json "
            "for a Chrome trace.",
            key="setting-value",
        )
    if path.suffix == ".json":
        return write_trace(documents, path)
    if with_plots and any(view_of(document).plots for document in documents):
        need_matplotlib()
    try:
        written = [path]
        if path.suffix == ".html":
            page = html_page(documents, with_plots=with_plots)
            replace_file(path, page.encode("utf-8"))
        else:
            written = _write_markdown(documents, path, with_plots=with_plots)
        for number, snapshot in enumerate(snapshots, start=1):
            written.append(path.with_name(f"{path.stem}-{number}.pickle"))
            replace_file(written[-1], snapshot)
        return written
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(
            f"cannot write {echo(str(output))}: {reason}.", key="file-unwritable"
        ) from error


def _write_markdown(documents: Sequence[Document], path: Path, *, with_plots: bool) -> list[Path]:
    written, parts = [path], []
    for index, document in enumerate(documents, start=1):
        image = _image(document, "png") if with_plots else None
        link = None
        if image is not None:
            picture = path.with_name(f"{path.stem}-{index}.png")
            replace_file(picture, image)
            written.append(picture)
            link = quote(os.fsencode(picture.name))
        parts.append(markdown_of(document, link))
    replace_file(path, "\n".join(parts).encode("utf-8"))
    return written


def html_page(documents: Sequence[Document], *, with_plots: bool = True) -> str:
    """Return one page that needs nothing beside it: no script, no network.

    Raises:
        ReportError: matplotlib is missing.
    """
    sections = "\n".join(_section(document, with_plots) for document in documents)
    title = _text(view_of(documents[0]).title if len(documents) == 1 else "hf_pyao: reports")
    return _PAGE.format(title=title, style=_STYLE, sections=sections)


def _section(document: Document, with_plots: bool) -> str:
    view = view_of(document)
    source = provenance_line(view, text=_text, command=_code)
    parts = [
        f"<h2>{_text(view.title)}</h2>",
        _paragraph(_text(view.summary)),
        _picture(document, view.title) if with_plots else "",
        *(_html_table(each) for each in view.tables),
        _paragraph(_text(view.conclusion)),
        _list(view.notes),
        _paragraph(_text(view.legend), "source"),
        _paragraph(source, "source"),
    ]
    return "<section>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def _picture(document: Document, title: str) -> str:
    """Return the plot as an image of its own, so that identifiers inside of two cannot meet."""
    image = _image(document, "svg")
    if image is None:
        return ""
    data = base64.b64encode(image).decode("ascii")
    return f'<img alt="{_text(f"plot: {title}")}" src="data:image/svg+xml;base64,{data}">'


def _paragraph(markup: str, kind: str = "") -> str:
    if not markup:
        return ""
    return f'<p class="{kind}">{markup}</p>' if kind else f"<p>{markup}</p>"


def _list(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _text(text: str) -> str:
    """Return what others wrote as the text of an element, or of a quoted attribute."""
    return html.escape(one_line(text), quote=True)


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


MOST_NARROW_COLUMNS = 4
"""Columns of a table beside each other on a narrow screen; of others each row is a list."""


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        tags = [f'{tag} class="text"'] * table.num_text_columns + [tag] * len(cells)
        if tag == "td":
            names = (f' data-name="{_text(name)}"' for name in table.header)
            tags = [f"{start}{name}" for start, name in zip(tags, names, strict=False)]
        marked = [
            f"<{start}>{_text(cell)}</{tag}>" for start, cell in zip(tags, cells, strict=False)
        ]
        return "<tr>" + "".join(marked) + "</tr>"

    body = "\n".join(line(row, "td") for row in table.rows)
    many = ' class="many"' if len(table.header) > MOST_NARROW_COLUMNS else ""
    return (
        f'<div class="wide"><table{many}>\n<thead>{line(table.header, "th")}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _image(document: Document, kind: str) -> bytes | None:
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
img { max-width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
code { overflow-wrap: anywhere; } p, li, h2 { overflow-wrap: break-word; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
td { white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: break-word; min-width: 8rem; max-width: 26rem; }
.text { text-align: left; }
tbody tr:nth-child(odd) { background: var(--band); }
.source, li { color: var(--soft); font-size: .85rem; }
@media (max-width: 640px) {
  body { margin: 1rem auto; padding: 0 .75rem; }
  table { font-size: .8rem; } th, td { padding: .3rem .4rem; }
  td.text { min-width: 5.5rem; max-width: 9.5rem; overflow-wrap: anywhere; }
}
@media screen and (max-width: 640px) {
  .many, .many tbody, .many tr, .many td { display: block; }
  .many thead { display: none; }
  .many tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .many td, .many td.text { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    max-width: none; padding: .1rem .4rem; text-align: right; white-space: normal; }
  .many td::before { content: attr(data-name); color: var(--soft); text-align: left; flex: none; }
  .many td:first-child { font-weight: 600; } .many td:empty { display: none; }
}
@media print {
  :root { --ink: #000000; --soft: #444444; --line: #bbbbbb; --back: #ffffff; --band: #ffffff; }
  body { margin: 0; max-width: none; font-size: 10pt; }
  .wide { overflow: visible; } table { font-size: 8pt; } th, td { padding: .15rem .35rem; }
  td { white-space: normal; } td.text { overflow-wrap: anywhere; min-width: 5rem; }
  h2, img { break-after: avoid; } tr, img { break-inside: avoid; }
  img { max-height: 16cm; width: auto; }
}
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
