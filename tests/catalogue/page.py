"""Writes anew what of hf_pyao/TROUBLESHOOTING.md comes from the source and the examples.

python -m tests.catalogue.page          # run the examples, then write
python -m tests.catalogue.page --only   # write with the messages that the page has
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from hf_pyao.settings.removed import REMOVED, REMOVED_OF_ZEROTH_ORDER, REMOVED_OPTIONS
from tests.catalogue.sites import sites

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "hf_pyao" / "TROUBLESHOOTING.md"
RESULTS = ROOT / "recipes" / "results" / "compatibility.json"
COMMAND = "python -m tests.catalogue.page"

MOST_BEGINNINGS = 6
"""Beginnings of messages that are listed for one key."""


class Entry(NamedTuple):
    """Cause and remedy of the errors and warnings that have one key, as the page has them."""

    key: str
    cause: str
    remedy: str


def chapters_in(page: str) -> dict[str, list[Entry]]:
    """Return the entries of each chapter below the list of keys."""
    chapters = page.partition("\n## Keys\n")[2].split("\n## ")[1:]
    found = {}
    for chapter in chapters:
        title, *entries = chapter.split("\n### ")
        found[title.strip()] = [
            Entry(entry.partition("\n")[0], _said(entry, "Cause"), _said(entry, "Remedy"))
            for entry in entries
        ]
    return found


def _said(entry: str, what: str) -> str:
    found = re.search(rf"^{what}: (.*)$", entry, re.MULTILINE)
    return found[1] if found else ""


def entries_in(page: str) -> list[Entry]:
    """Return the entries of all chapters."""
    return [entry for entries in chapters_in(page).values() for entry in entries]


def render(page: str, messages: dict[str, str]) -> str:
    """Return *page* with all anew that is not written by hand.

    By hand are what stands above the versions, chapters, keys, causes and remedies. *messages* has
    the example of each key.
    """
    head = page.partition("## Tested versions\n")[0]
    head = re.sub(r"There are \d+ keys", f"There are {len(entries_in(page))} keys", head)
    chapters = chapters_in(page)
    parts = [head + versions(), "## Keys\n"]
    parts.append("\n".join(_chapter_index(*each) for each in chapters.items()))
    beginnings = _beginnings()
    for title, entries in chapters.items():
        parts.append(f"\n## {title}\n")
        parts.extend(_entry(e, messages.get(e.key), beginnings[e.key]) for e in entries)
    return "\n".join(parts).rstrip() + "\n"


def _chapter_index(title: str, entries: list[Entry]) -> str:
    links = ", ".join(f"[{e.key}](#{e.key})" for e in entries)
    return f"- {title}: {links}"


def _beginnings() -> dict[str, list[str]]:
    """Return how the messages of each key begin, as the source has them."""
    found: dict[str, list[str]] = defaultdict(list)
    for site in sites():
        says_something = len(re.findall(r"[a-z]{3,}", site.words)) > 1
        if site.key and says_something and site.words not in found[site.key]:
            found[site.key].append(site.words)
    return found


def _entry(entry: Entry, message: str | None, beginnings: list[str]) -> str:
    lines = [f"### {entry.key}\n"]
    if beginnings:
        listed = "; ".join(
            f"`{text.replace('`', chr(39))} …`" for text in beginnings[:MOST_BEGINNINGS]
        )
        more = len(beginnings) - MOST_BEGINNINGS
        lines.append(f"First words: {listed}{f'; and {more} more' if more > 0 else ''}.\n")
    lines += [f"Cause: {entry.cause}\n", f"Remedy: {entry.remedy}\n"]
    if entry.key == "setting-removed":
        lines.append(_removed())
    if message is not None:
        lines.append("```text\n" + message + "\n```\n")
    return "\n".join(lines)


def _removed() -> str:
    """Return the table of what earlier versions had among the settings."""
    rows = ["| setting | value | removed in | what to do instead |", "|---|---|---|---|"]
    for gone in (*REMOVED, *REMOVED_OF_ZEROTH_ORDER):
        value = "any" if gone.value is None else f"`{gone.value!r}`"
        rows.append(f"| `{gone.setting}` | {value} | {gone.version} | {gone.instead} |")
    rows += [
        f"| `{gone.setting}` | | {gone.version} | {gone.instead} |" for gone in REMOVED_OPTIONS
    ]
    return "\n".join(rows) + "\n"


def messages_in(page: str) -> dict[str, str]:
    """Return the examples that the text of a page has, by key."""
    found = {}
    for part in page.split("\n### ")[1:]:
        example = re.search(r"^```text\n(.*?)\n```$", part, re.MULTILINE | re.DOTALL)
        if example:
            found[part.partition("\n")[0]] = example[1]
    return found


def versions() -> str:
    """Return the table of the versions that are required, and the oldest and newest tested."""
    required = re.findall(
        r'^ *"(\w+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    required += re.findall(r"\b(deepspeed|triton)>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    oldest = dict(re.findall(r"\b(\w+)==([\d.]+\d)", _oldest_command()))
    newest = json.loads(RESULTS.read_text(encoding="utf-8"))["provenance"]["versions"]
    rows = ["| package | required | oldest tested | newest tested |", "|---|---|---|---|"]
    for name, least in dict(required).items():
        if name in oldest or newest.get(name):
            rows.append(
                f"| {name} | ≥ {least} | {oldest.get(name, '')} | {newest.get(name) or ''} |"
            )
    rows.append(f"| python | ≥ 3.10 | | {newest['python']} |")
    head = (
        "## Tested versions\n\nRequired: `pyproject.toml`. Oldest: the environment of "
        "CONTRIBUTING.md for the oldest versions. Newest: the environment of "
        "[COMPATIBILITY.md](COMPATIBILITY.md). An empty cell: not pinned there.\n"
    )
    return head + "\n" + "\n".join(rows) + "\n"


def _oldest_command() -> str:
    """Return the command that CONTRIBUTING gives for an environment with the oldest versions."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition(".venv-oldest/bin/pip install")[2].partition("```")[0]


def main(arguments: list[str]) -> None:
    """Run the examples, and write the page; or write it alone."""
    text = PAGE.read_text(encoding="utf-8")
    messages = messages_in(text) if "--only" in arguments else {}
    if "--only" not in arguments:
        from tests.catalogue.examples.all_examples import EXAMPLES, message_of

        warnings.simplefilter("ignore")
        for key in EXAMPLES:
            with tempfile.TemporaryDirectory() as folder:
                messages[key] = message_of(key, Path(folder))
    PAGE.write_text(render(text, messages), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
