"""Writes ``OPTIONS.md``, the options of all commands as one table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hf_pyao
from hf_pyao import cli

PAGE = Path(hf_pyao.__file__).parent / "tools" / "OPTIONS.md"

HEAD = """\
# Options of all commands

For those who look for an option, and for the commands that have it. `pyao COMMAND --help` lists
those of one command. `python -m tests.tools.options_page` writes this page from the commands' parsers.

| option | commands | what it says |
|---|---|---|
"""


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command of *parser*, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options_page(parser: argparse.ArgumentParser) -> str:
    """Return the page: each option once for each thing that it means, with its commands."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, command in commands_of(parser).items():
        for option, meaning in _options_of(command):
            found.setdefault((option, meaning), []).append(name)
    rows = sorted(found.items(), key=lambda each: each[0][0].lstrip("`-").lower())
    lines = [f"| {option} | {', '.join(names)} | {meaning} |" for (option, meaning), names in rows]
    return HEAD + "\n".join(lines) + "\n"


def _options_of(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    formatter: Any = command._get_formatter()
    for action in command._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else _value_of(action)
        if not action.option_strings:
            names = f"`{value}`"
        elif isinstance(action, argparse.BooleanOptionalAction):
            names = ", ".join(f"`{name}`" for name in action.option_strings)
        else:
            names = ", ".join(
                f"`{name} {value}`".replace(" `", "`") for name in action.option_strings
            )
        meaning = formatter._expand_help(action) if action.help else ""
        yield _cell(names), _cell(meaning)


def _value_of(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        value = action.metavar
    elif action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.dest.upper() if action.option_strings else action.dest
    if action.nargs == "?" and action.option_strings:
        return f"[{value}]"
    return f"{value} ..." if action.nargs in ("+", "*") else value


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(options_page(cli.make_parser()), encoding="utf-8")
