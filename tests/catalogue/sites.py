"""Finds, in the source of hf_pyao, each place that raises an error or logs a warning, and its key."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hf_pyao

ROOT = Path(hf_pyao.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LOGS = ("warning", "error", "exception", "critical", "log")
"""Methods of a logger that may show a warning: only ``errors.warn`` may call one."""

NUM_WORDS = 9
"""Words of a message that the page lists."""


@dataclass(frozen=True)
class Site:
    """One place; *key* is None where it has none."""

    path: Path
    line: int
    key: str | None
    words: str
    """The first words of the message, with ``…`` for what is filled in."""

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}"


@dataclass(frozen=True)
class Foreign:
    """A raise of a class that is no PyAOError."""

    path: Path
    line: int
    name: str


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


@cache
def key_of_class() -> dict[str, str]:
    """Return the key of each class of ours, by its name; empty where each raise has its own."""
    classes = {
        n.name: n for t in trees().values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)
    }
    found = {"PyAOError": ""}
    while True:
        new = {
            name: _class_key(node)
            for name, node in classes.items()
            if name not in found and any(_name(base) in found for base in node.bases)
        }
        if not new:
            return found
        found |= new


def _class_key(node: ast.ClassDef) -> str:
    for each in node.body:
        if isinstance(each, ast.Assign) and _name(each.targets[0]) == "key":
            assert isinstance(each.value, ast.Constant)
            return str(each.value.value)
    return ""


def _first_words(node: ast.expr | None) -> str:
    if isinstance(node, ast.BinOp):
        return _first_words(node.left)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
    return " ".join(text.split()[:NUM_WORDS])


def _constant(node: ast.expr | None) -> str | None:
    """Return a key that is written down; of ``x.key``, which another part chose, nothing."""
    if isinstance(node, ast.IfExp):
        return _constant(node.body)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "" if isinstance(node, ast.Attribute) and node.attr == "key" else None


def _site(path: Path, call: ast.Call, key: str | None, message: ast.expr | None) -> Site:
    return Site(path, call.lineno, key, _first_words(message))


def _site_of_call(path: Path, node: ast.Call, parameters: set[str], is_raised: bool) -> Site | None:
    name = _name(node.func)
    first = node.args[0] if node.args else None
    given = next((k.value for k in node.keywords if k.arg == "key"), None)
    if name == "warn" and isinstance(first, ast.Name) and first.id == "logger":
        return _site(path, node, _constant(node.args[1]), node.args[2])
    if name == "warn" and path.name in ("rules.py", "transitions.py"):
        return _site(path, node, _constant(first), node.args[1])
    if name == "Say" and len(node.args) > 1 and not isinstance(node.args[1], ast.Name):
        return _site(path, node, _constant(node.args[1]), first)
    is_logged = isinstance(node.func, ast.Attribute) and _name(node.func.value) == "logger"
    if (is_logged and name in LOGS) or ast.unparse(node.func) == "warnings.warn":
        return None if path.name == "errors.py" else _site(path, node, None, first)
    if name in key_of_class():
        key = _constant(given) if given is not None else key_of_class()[name] or None
        return _site(path, node, key, first)
    if is_raised and isinstance(node.func, ast.Name) and name in parameters:  # a class, given
        return _site(path, node, _constant(given), first)
    return None


def _sites_of(path: Path, tree: ast.Module) -> Iterator[Site]:
    raised = {id(n.exc) for n in ast.walk(tree) if isinstance(n, ast.Raise)}
    parameters: dict[int, set[str]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
            for node in ast.walk(function):
                parameters.setdefault(id(node), set()).update(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            site = _site_of_call(path, node, parameters.get(id(node), set()), id(node) in raised)
            if site is not None:
                yield site
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
            if node.exc.id in key_of_class():
                yield Site(path, node.lineno, key_of_class()[node.exc.id] or None, "")


@cache
def sites() -> tuple[Site, ...]:
    """Return all places, by file and line."""
    return tuple(site for path, tree in trees().items() for site in _sites_of(path, tree))


def foreign_raises() -> Iterator[Foreign]:
    """Yield each raise of a class that is none of ours."""
    for path, tree in trees().items():
        local = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                name = _name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                is_class = hasattr(builtins, name) or name.lstrip("_")[:1].isupper()
                if is_class and name not in local and name not in key_of_class():
                    yield Foreign(path, node.lineno, name)
