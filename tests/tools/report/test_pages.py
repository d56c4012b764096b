"""Pages: Markdown with its pictures, and HTML that needs nothing beside it."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.tools.report.pages import html_page, write_page
from tests.helpers.documents import make_bench, make_facts, make_run

PNG = b"\x89PNG\r\n\x1a\n"


class _Page(HTMLParser):
    """Collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


@pytest.mark.thorough
def test_html_is_well_formed_and_self_contained() -> None:
    text = html_page([make_bench(), make_run(), make_facts()])
    page = _Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.attributes]
    assert "script" not in tags
    assert "link" not in tags
    images = [attributes for tag, attributes in page.attributes if tag == "img"]
    assert len(images) == 2, "one plot for the benchmark, one for the run"
    for image in images:
        source = image["src"] or ""
        head, _, data = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(data)
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "equal bits" in page.cells
    assert "last layer" in page.cells


def test_markdown_has_its_pictures_beside_it(tmp_path: Path) -> None:
    written = write_page([make_bench(), make_facts()], tmp_path / "deep" / "out.md")
    assert [path.name for path in written] == ["out.md", "out-1.png"]
    text = written[0].read_text(encoding="utf-8")
    assert "](out-1.png)" in text
    assert written[1].read_bytes().startswith(PNG)


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"ends in \.md or \.html"):
        write_page([make_bench()], tmp_path / "out.pdf")


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match=r"pip install 'hf_pyao\[report\]'.*--no-plots"):
        write_page([make_bench()], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
    (path,) = write_page([make_bench()], tmp_path / "out.html", with_plots=False)
    assert "<table" in path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write"):
        write_page([make_facts()], tmp_path / "file" / "out.md")
