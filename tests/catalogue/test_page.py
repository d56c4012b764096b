"""The page of troubleshooting says what the source and the examples give."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hf_pyao.errors import ConfigError, NoLayersFoundError, warn
from tests.catalogue.examples.all_examples import EXAMPLES, message_of
from tests.catalogue.page import COMMAND, PAGE, ROOT, entries_in, messages_in, render
from tests.catalogue.triggered_by import TRIGGERED_BY
from tests.catalogue.witness import keys_seen

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_of_this_source() -> None:
    assert render(TEXT, messages_in(TEXT)) == TEXT, f"write it anew: {COMMAND}"


def test_every_key_has_an_example() -> None:
    """Its own, or a test that triggers it."""
    assert not set(EXAMPLES) & set(TRIGGERED_BY)
    assert set(EXAMPLES) | set(TRIGGERED_BY) == {entry.key for entry in entries_in(TEXT)}
    assert set(messages_in(TEXT)) == set(EXAMPLES)


def test_the_tests_that_are_named_exist() -> None:
    for key, name in TRIGGERED_BY.items():
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}(" in source, key


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("key", sorted(EXAMPLES))
@pytest.mark.filterwarnings("ignore")
def test_an_example_triggers_its_key(key: str, tmp_path: Path) -> None:
    message = message_of(key, tmp_path)
    shown = messages_in(TEXT)[key]
    assert _without_figures(message) == _without_figures(shown)


def test_links_of_the_page_have_a_target() -> None:
    headings = re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= anchors


def test_keys_are_seen_in_errors_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("hf_pyao.some")
    with keys_seen() as seen:
        error = ConfigError("x is 3.", key="setting-value")
        assert seen == {"setting-value"}
        warn(logger, "file-damaged", "no: %s", error)
        NoLayersFoundError("none")
    assert seen == {"setting-value", "file-damaged", "no-layers-found"}
    warn(logger, "disk", "later")
    assert "disk" not in seen


def _without_figures(message: str) -> str:
    return re.sub(r"[0-9a-f]{32,}|\d+(\.\d+)?", "#", message)
