"""Documents as Markdown, each with its provenance beneath."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.tools.report.kinds import Document, view_of
from hf_pyao.tools.report.markdown import code, escaped, paragraph, table
from hf_pyao.tools.report.views.view import View


def markdown_of(document: Document, image: str | None = None) -> str:
    """Return *document* as Markdown.

    Args:
        document: of any kind.
        image: where its plot is, as a link gives it; None: there is none.
    """
    return markdown_of_view(view_of(document), image)


def markdown_of_view(view: View, image: str | None = None) -> str:
    """Return what a document shows as Markdown; *image* as in :func:`markdown_of`."""
    parts = [
        f"## {paragraph(view.title)}",
        paragraph(view.summary),
        "" if image is None else f"![{escaped(view.title)}]({image})",
        *(
            table(header, rows, num_text_columns=num_text_columns)
            for header, rows, num_text_columns in view.tables
        ),
        paragraph(view.conclusion),
        "\n".join(f"- {paragraph(line)}" for line in view.notes),
        paragraph(view.legend),
        provenance_line(view, text=paragraph, command=code),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def provenance_line(
    view: View,
    *,
    text: Callable[[str], str],
    command: Callable[[str], str],
) -> str:
    """Return in one paragraph where the figures come from; nothing if that was not noted.

    *text* and *command* make page text of what the report says: of its words, of a command line.
    """
    source = view.provenance
    if source is None:
        return ""
    shown = [
        *map(text, view.measured_on),
        command(source.command),
        *map(text, _source_parts(source)),
    ]
    return "; ".join(shown) + "."


def _source_parts(source: Provenance) -> Sequence[str]:
    parts = [source.created_at]
    if source.commit is None:
        parts.append(f"source {source.source_sha256}")
    else:
        changed = " with changes" if source.is_dirty else ""
        parts.append(f"commit {source.commit[:12]}{changed}, source {source.source_sha256}")
    parts += [f"{name} {version}" for name, version in source.versions.items() if version]
    parts.append(f"{source.host.get('processor')}, {source.host.get('num_cores')} cores")
    return parts
