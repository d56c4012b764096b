"""Reports that others wrote: read whole or refused in one line, and their text is only ever text."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from hf_pyao import cli
from hf_pyao.plan.documents.plan import PlannedSlot
from hf_pyao.plan.documents.run import RunReport
from hf_pyao.plan.documents.schema import ReportError, to_plain, write_json
from hf_pyao.plan.documents.step import StepSpan
from hf_pyao.tools.report import markdown
from hf_pyao.tools.report.kinds import figure_of, read_document
from hf_pyao.tools.report.pages import html_page
from hf_pyao.tools.report.plots.look import image_bytes
from hf_pyao.tools.report.tables import markdown_of
from tests.helpers.documents import (
    make_bench,
    make_facts,
    make_microbatch,
    make_plan,
    make_row,
    make_run,
    make_step,
)

HOSTILE = "\x1b[31m\n\n# forged\n\n<script>alert(1)</script> [x](javascript:1) `a` | b \u202e \ud800 $\\frac$"
"""A heading, a script, a link, escape sequences, a mark of direction, and no formula."""

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 3, 1.5, -0.0, 1e-300, 1e99, 1e308, 10**30, 10**400),
    *("", "x", HOSTILE, "9" * 500, [], {}, [[]], [None], {"a": None}, {"a": {"b": [1]}}, [1, "x"]),
]


def _documents() -> list[dict[str, Any]]:
    search = [
        make_row("none", 100.0, 8.0, num_tried=5, micro_batch=7),
        make_row("checkpoint", 131.0, None, num_tried=2, micro_batch=9),
    ]
    documents = (
        make_run(),
        make_bench(),
        make_bench(search),
        make_facts(),
        make_step(),
        make_plan(),
        make_microbatch(),
    )
    return [to_plain(document) for document in documents]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value inside a document, the outermost left out."""
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for key, item in items for place in ((*path, key), *_places(item, (*path, key)))]


def _mutated(document: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return *document* with one to three values exchanged, dropped, added or renamed."""
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 3)):
        *path, key = draw.choice(_places(document))
        inside: Any = document
        for step in path:
            inside = inside[step]
        how = draw.randrange(8)
        if how == 0:
            del inside[key]
        elif how == 1 and isinstance(inside, dict):
            inside[draw.choice(["", "x", HOSTILE, "kind", "kept_bytes/x"])] = inside[key]
        elif how == 2 and isinstance(inside, list):
            inside.extend([inside[key]] * draw.choice([1, 150]))
        else:
            inside[key] = copy.deepcopy(draw.choice(VALUES))
        if not _places(document):
            break
    return document


def _render(path: Path, *argv: str) -> tuple[int, str, str]:
    """Run ``pyao report`` in this process; return status, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a plot may lack a glyph, or room
            status = cli.main(["report", str(path), *argv])
    return status, out.getvalue(), err.getvalue()


def _check_rendered(document: dict[str, Any], folder: Path, *argv: str) -> bool:
    """Render a document; say whether it was accepted. Refused, it must be so in one line."""
    path = folder / "x.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    status, out, err = _render(path, *argv)
    assert status in (0, 2)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", out + err)
    if status == 2:
        assert err.startswith("pyao: ") and len(err.splitlines()) == 1 and len(err) < 900
    elif not argv:
        headings = [line for line in out.splitlines() if re.match(" {0,3}#", line)]
        assert len(headings) == 1
        assert "<script" not in re.sub(r"(`+) .*? \1", "", out), "a span of code may hold any text"
    return status == 0


def _fuzz(seeds: range, folder: Path, *argv: str) -> None:
    documents, num_accepted = _documents(), 0
    for seed in seeds:
        draw = random.Random(seed)
        num_accepted += _check_rendered(_mutated(draw.choice(documents), draw), folder, *argv)
    assert 0.05 < num_accepted / len(seeds) < 0.95, "both ends are looked at"


@pytest.mark.thorough
def test_many_changed_documents_are_read_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    _fuzz(range(1_000, 4_000), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_changed_documents_are_drawn_or_refused_in_one_line(suffix: str, tmp_path: Path) -> None:
    num = {".html": 100, ".md": 300}[suffix]  # a page in HTML draws each plot four times
    _fuzz(range(10_000, 10_000 + num), tmp_path, "-o", str(tmp_path / f"out{suffix}"))


@pytest.mark.thorough
def test_every_value_of_every_document_may_be_anything(tmp_path: Path) -> None:
    for document in _documents():
        for *path, key in _places(document):
            for value in VALUES:
                changed = copy.deepcopy(document)
                inside: Any = changed
                for step in path:
                    inside = inside[step]
                inside[key] = value
                _check_rendered(changed, tmp_path)


# ---- what others wrote is text -------------------------------------------------------------------


def _hostile() -> list[Any]:
    run = make_run(description=HOSTILE, policy=HOSTILE, device=HOSTILE, extra={"name": HOSTILE})
    totals = {**run.totals, f"kept_bytes/{HOSTILE}": 7.0}
    provenance = dataclasses.replace(run.provenance, command=HOSTILE, created_at=HOSTILE)
    row = make_row(HOSTILE, 10.0, 1.0, label=HOSTILE, status=HOSTILE, reason=HOSTILE)
    bench = dataclasses.replace(make_bench([row]), title=HOSTILE, device={"name": HOSTILE})
    facts = dataclasses.replace(make_facts(), title=HOSTILE, facts={HOSTILE: [HOSTILE]})
    span = StepSpan(lane="stall", label=HOSTILE, start_ms=0.0, end_ms=1.0)
    peak = dataclasses.replace(make_step().peak, where=HOSTILE, tensor=HOSTILE)  # type: ignore[type-var]
    step = make_step(title=HOSTILE, device=HOSTILE, spans=[span], peak=peak)
    slot = PlannedSlot(name=f"{HOSTILE}:0", action="keep", reason=HOSTILE)
    plan = make_plan(source=HOSTILE, slots=[slot], figures={HOSTILE: 1.0}, model={HOSTILE: HOSTILE})
    run = dataclasses.replace(run, totals=totals, provenance=provenance)
    return [run, bench, facts, step, plan]


@pytest.mark.parametrize("document", _hostile(), ids=lambda document: document.kind)
def test_markdown_shows_text_of_others_as_it_is(document: Any) -> None:
    text = markdown_of(document)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", text)
    assert [line for line in text.splitlines() if re.match(" {0,3}#", line)] == [
        text.splitlines()[0]
    ]
    outside = re.sub(r"(`+) .*? \1", "", text)
    assert "# forged &lt;script>alert(1)&lt;/script> \\[x\\](javascript:1) \\`a\\` \\| b" in outside
    assert "<" not in outside
    assert "](" not in outside.replace("\\](", "")


@pytest.mark.thorough
@pytest.mark.parametrize("document", _hostile(), ids=lambda document: document.kind)
@pytest.mark.sampled(every=1000)
def test_html_shows_text_of_others_as_it_is(document: Any) -> None:
    text = html_page([document])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", text)
    assert "<script" not in text
    assert "# forged &lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:1) `a` | b" in text
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1. one", "1\\. one"),
        ("2026-01-02", "2026-01-02"),
        ("1.3b opt", "1.3b opt"),
        ("- item", "\\- item"),
        ("> said", "\\> said"),
        ("# x", "\\# x"),
        ("=====", "\\====="),
        ("save_on_cpu", "save_on_cpu"),
        ("_x_ and __y__", "\\_x\\_ and \\_\\_y\\_\\_"),
        ("self_attn.*", "self_attn.\\*"),
        ("&lt; & &#60;", "&amp;lt; & &amp;#60;"),
        ("a\\", "a\\\\"),
    ],
)
def test_markup_is_escaped_where_it_would_be_some(text: str, shown: str) -> None:
    assert markdown.paragraph(text) == shown


def test_code_may_hold_backticks() -> None:
    assert markdown.code("a b") == "`a b`"
    assert markdown.code("`a` ``b``") == "``` `a` ``b`` ```"


def test_labels_of_plots_hold_no_formulas() -> None:
    figure = figure_of(make_bench([make_row("$\\frac$", 10.0, 1.0, num_tried=2)]))
    assert figure is not None
    image_bytes(figure, "png")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [r"\$\frac\$"]


def test_a_terminal_of_another_encoding_gets_question_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "x.json", make_bench())
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert cli.main(["report", str(tmp_path / "x.json")]) == 0
    stream.seek(0)
    assert "1.00?" in stream.read()


def test_errors_hold_no_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[31mred\n.json"
    path.write_text("{")
    assert cli.main(["report", str(path)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"totals": []}, r"totals is \[\]; expected an object"),
        ({"totals": {"num_micro_batches": "x"}}, r"totals, 'num_micro_batches' is 'x'; expected a"),
        ({"config": "x"}, r"config is 'x'; expected an object"),
        ({"extra": 5}, r"extra is 5; expected an object"),
        ({"layer_names": [1]}, r"layer_names\[0\] is 1; expected a text"),
        ({"link": {"d2h_gib_per_s": True}}, r"link, 'd2h_gib_per_s' is True; expected a number"),
        ({"totals": {"x": 10**400}}, r"totals, 'x' is 1000.*; expected a number, at most 1e100"),
        ({"extra": {"x": 1e308}}, r"extra, 'x' is 1e\+308; expected a number, at most"),
        ({"policy": None}, r"policy is None; expected a text"),
        ({"schema_version": True}, r"schema_version is True; expected a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        RunReport.from_dict({**make_run().to_dict(), **change})


def test_what_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"kind":' + "[" * 200_000)
    with pytest.raises(ReportError, match="nested too deep"):
        read_document(path)
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(ReportError, match="nested deeper than 32 levels"):
        RunReport.from_dict({**make_run().to_dict(), "extra": {"x": nested}})
    path.write_text('{"kind": []}')
    with pytest.raises(ReportError, match=r"has kind \[\]; known: run, bench, facts"):
        read_document(path)


def test_documents_of_every_kind_are_read_back(tmp_path: Path) -> None:
    for document in _documents():
        (tmp_path / "x.json").write_text(json.dumps(document))
        assert to_plain(read_document(tmp_path / "x.json")) == document


def test_a_figure_that_was_none_is_read_back(tmp_path: Path) -> None:
    """It is written as null, since JSON has no NaN."""
    report = make_run(totals={"would_hold_bytes": float("nan"), "num_micro_batches": 1.0})
    report.to_json_file(tmp_path / "x.json")
    assert RunReport.from_json_file(tmp_path / "x.json").totals == {"num_micro_batches": 1.0}


def test_a_command_line_that_is_no_text_is_written_and_read_back(tmp_path: Path) -> None:
    """Arguments that are no UTF-8 reach Python as surrogates."""
    provenance = dataclasses.replace(make_run().provenance, command="train.py \udcff")
    make_run(provenance=provenance).to_json_file(tmp_path / "x.json")
    assert RunReport.from_json_file(tmp_path / "x.json").provenance == provenance
