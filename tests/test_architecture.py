"""The package's own structure: which part may import which, and what an import costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_pyao

ROOT = Path(hf_pyao.__file__).parent

LAYERS = (
    ("text",),
    ("errors",),
    ("files", "metrics"),
    ("codecs", "stores", "losses", "settings"),
    ("config", "transfer"),
    ("runtime",),
    ("recompute", "report"),
    ("simulation", "planning"),
    ("integrations",),
    ("bench",),
    ("cli",),
)
"""Parts of the package from the bottom up; each may import those before it, and itself."""

ONLY_TORCH = (
    *("text", "errors", "files", "metrics", "settings", "config"),
    *("codecs", "stores", "transfer", "runtime", "recompute", "simulation", "losses", "planning"),
)
"""Parts that import neither transformers nor accelerate, not even inside a function."""

LAZY = {"codecs/kernels.py": {"triton"}}
"""Files that are themselves imported only where an optional package is there."""


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Yield the modules that a file imports; those for type checkers alone are left out."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            if node.module == "hf_pyao":  # public names: what counts is where they live
                homes = (hf_pyao._HOMES.get(alias.name, "hf_pyao") for alias in node.names)
                yield from homes
            else:
                yield node.module
        pending.extend(ast.iter_child_nodes(node))


FILES = sorted(
    path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"
)


def test_every_part_has_its_place() -> None:
    known = {part for layer in LAYERS for part in layer}
    assert {part_of(path) for path in FILES} <= known, "a new part needs its place in LAYERS"


def test_imports_point_one_way() -> None:
    for path in FILES:
        part = part_of(path)
        (rank,) = [index for index, layer in enumerate(LAYERS) if part in layer]
        below = {name for layer in LAYERS[:rank] for name in layer} | {part}
        for module in imports_of(path):
            if module.startswith("hf_pyao."):
                imported = module.split(".")[1]
                assert imported in below, f"{path}: {part} may not import {imported}"


def test_the_lower_parts_import_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "hf_pyao", "triton", "scipy", "numpy"}
    for path in FILES:
        if part_of(path) in ONLY_TORCH:
            for module in imports_of(path):
                assert module.split(".")[0] in allowed, f"{path} imports {module}"


def test_optional_packages_are_imported_where_they_are_used() -> None:
    optional = {"datasets", "trl", "peft", "deepspeed", "rich", "matplotlib", "triton", "scipy"}
    for path in FILES:
        lazy = LAZY.get(str(path.relative_to(ROOT)), set())
        for module in imports_of(path, at_import_only=True):
            assert module.split(".")[0] not in optional - lazy, f"{path} imports {module} at once"


def test_the_public_names() -> None:
    for name in hf_pyao.__all__:
        assert getattr(hf_pyao, name).__name__ == name
    assert set(hf_pyao.__all__) <= set(dir(hf_pyao))
    with pytest.raises(AttributeError, match=r"no attribute 'PyA0Config'; it has .*PyAOConfig"):
        _ = hf_pyao.PyA0Config


# What torch forbids its own offloading to use: memory stays fragmented (record_stream), or the whole
# device stands still (synchronize). Only transports may know of streams at all.
FORBIDDEN = ("record_stream", "synchronize", "empty_cache")


def test_the_engine_waits_for_events_alone() -> None:
    for path in FILES:
        if part_of(path) in ("runtime", "transfer", "recompute", "stores", "codecs"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    assert node.attr not in FORBIDDEN, f"{path}:{node.lineno} uses {node.attr}"


# ---- the tests' own README ----------------------------------------------------------------------------


def test_the_table_of_traps_names_tests_that_exist() -> None:
    tests = Path(__file__).parent
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (tests / "README.md").read_text())
    assert len(named) > 30
    for file, name in named:
        path = tests / file
        assert path.is_file(), f"README.md names {file}"
        assert not name or f"def {name}(" in path.read_text(), f"README.md names {file}::{name}"


# ---- importing ---------------------------------------------------------------------------------------


def in_fresh_interpreter(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:hf_pyao", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_it_costs_nothing() -> None:
    code = """
import sys, json
import hf_pyao
heavy = [m for m in ("torch", "transformers", "accelerate", "datasets", "trl", "peft", "scipy")
         if m in sys.modules]
from hf_pyao import PyAOConfig, attach, register_module_map
PyAOConfig()
import torch
print(json.dumps({
    "heavy": heavy,
    "later": [m for m in ("transformers", "accelerate", "datasets", "trl") if m in sys.modules],
    "device": torch.cuda.is_initialized(),
}))
"""
    seen = json.loads(in_fresh_interpreter(code))
    assert seen["heavy"] == []
    assert seen["later"] == []
    assert seen["device"] is False
