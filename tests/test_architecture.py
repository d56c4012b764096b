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
    ("errors", "ranks", "weak_calls"),
    ("files", "metrics", "quantities", "hardware", "gradient_buffer", "rerun"),
    ("attention", "codecs", "stores", "losses", "tiling", "settings"),
    ("config", "transfer"),
    ("levers",),
    ("runtime",),
    ("recompute", "documents"),
    ("simulation", "planning"),
    ("auto",),
    ("integrations", "report"),
    ("estimate",),
    ("bench",),
    ("cli",),
)
"""Parts of the package from the bottom up; each may import those before it, and itself."""

ONLY_TORCH = (
    *(
        "text",
        "errors",
        "ranks",
        "files",
        "metrics",
        "quantities",
        "hardware",
        "settings",
        "config",
    ),
    *("levers", "documents"),
    *("attention", "gradient_buffer", "rerun", "weak_calls", "tiling"),
    *("codecs", "stores", "transfer", "runtime", "recompute", "simulation", "losses", "planning"),
    "auto",
)
"""Parts that import neither transformers nor accelerate, not even inside a function."""

LAZY = {"codecs/kernels.py": {"triton"}}
"""Files that are themselves imported only where an optional package is there."""


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(
    path: Path, *, at_import_only: bool = False, also_types: bool = False
) -> Iterator[str]:
    """Yield the modules that a file imports; those for type checkers alone only if *also_types*."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_for_types and not also_types:
            assert isinstance(node, ast.If)
            pending.extend(node.orelse)
            continue
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))
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


def test_the_schedule_is_arithmetic() -> None:
    """It knows neither torch nor the rest of the package: the predictor uses it too."""
    found = set(imports_of(ROOT / "transfer" / "schedule.py", also_types=True))
    assert {module.split(".")[0] for module in found} <= set(sys.stdlib_module_names)


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


@pytest.mark.thorough
def test_no_imports_go_in_a_circle() -> None:
    """Those for type checkers alone, and those inside of functions, count too."""
    names = {_module_of(path): path for path in ROOT.rglob("*.py")}
    graph = {
        name: {
            target for module in imports_of(path, also_types=True) if (target := module) in names
        }
        for name, path in names.items()
        if name != "hf_pyao"  # which names the public ones, lazily
    }
    for name in graph:
        graph[name] = {target for target in graph[name] if target in graph}
    done: set[str] = set()
    for start in sorted(graph):
        path: list[str] = []
        _walk(start, graph, path, done)


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(name: str, graph: dict[str, set[str]], path: list[str], done: set[str]) -> None:
    assert name not in path, " -> ".join([*path[path.index(name) :], name])
    if name in done:
        return
    path.append(name)
    for target in sorted(graph[name]):
        _walk(target, graph, path, done)
    path.pop()
    done.add(name)


# ---- one writer for each state -----------------------------------------------------------------------

WRITTEN_AT_HOME = {
    "transfer/moved_bytes.py": {"MovedBytes"},
    "transfer/schedule.py": {"Window", "Schedule"},
    "transfer/window.py": {"OffloadWindow"},
    "transfer/compute_streams.py": {"ComputeStreams", "Home", "Lingering"},
    "runtime/tape.py": {"SlotEntry", "Layer", "LayerCall", "Tape", "MicroBatch", "StorageTable"},
    "runtime/saved_tensor.py": {"WatchedStorage", "SavedStorage", "SavedTensor", "KeptTensor"},
    "runtime/running.py": {"Running", "Token"},
    "recompute/trace_values.py": {"Value", "TensorSource"},
    "recompute/replay.py": {"DroppedStorage", "Replay"},
    "recompute/recomputer.py": {"CallRecomputation"},
}
"""Classes whose attributes no other file assigns."""

FOREIGN = {"data", "requires_grad", "grad"}
"""Attributes of torch's that have the name of one of ours."""

CHANGES = {"append", "extend", "add", "clear", "pop", "popleft", "remove", "discard", "update"}

ALLOWED_CHANGES = {
    # A set, a table and a dictionary that pack hooks write in the hottest path there is.
    ("runtime/packing.py", "saved_shapes"),
    ("runtime/packing.py", "entries"),
    ("runtime/packing.py", "casts"),
    ("runtime/packing.py", "table"),  # asked, by its own methods
}


def attributes_of(tree: ast.Module, classes: set[str]) -> set[str]:
    """Return the names of the attributes that instances of *classes* have."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for part in ast.walk(node):
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
                for target in targets_of(part):
                    if isinstance(target.value, ast.Name) and target.value.id == "self":
                        found.add(target.attr)
    return found - FOREIGN


def targets_of(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns or deletes, items of them included."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets.extend(target.elts)
        elif isinstance(target, ast.Subscript):
            targets.append(target.value)
        elif isinstance(target, ast.Attribute):
            yield target


def test_state_is_written_at_home_alone() -> None:
    homes = {home: ast.parse((ROOT / home).read_text()) for home in WRITTEN_AT_HOME}
    attributes = {home: attributes_of(tree, WRITTEN_AT_HOME[home]) for home, tree in homes.items()}
    for home, classes in WRITTEN_AT_HOME.items():
        defined = {node.name for node in homes[home].body if isinstance(node, ast.ClassDef)}
        assert classes <= defined, f"{home} does not define {classes - defined}"
        assert attributes[home], home
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        if file.split("/")[0] not in ("transfer", "runtime", "recompute", "integrations"):
            continue
        elsewhere = {name for home, names in attributes.items() if home != file for name in names}
        own = attributes_of_all_classes(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in targets_of(node):
                is_own = isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
                if target.attr in elsewhere and not is_own and target.attr not in own:
                    assert (file, target.attr) in ALLOWED_CHANGES, (
                        f"{file}:{target.lineno} assigns {ast.unparse(target)}"
                    )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changed = node.func.value
                if node.func.attr in CHANGES and isinstance(changed, ast.Attribute):
                    is_own = isinstance(changed.value, ast.Name) and changed.value.id == "self"
                    if changed.attr in elsewhere and not is_own and changed.attr not in own:
                        assert (file, changed.attr) in ALLOWED_CHANGES, (
                            f"{file}:{node.lineno} changes {ast.unparse(changed)}"
                        )


def attributes_of_all_classes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return attributes_of(tree, {n.name for n in tree.body if isinstance(n, ast.ClassDef)})


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
