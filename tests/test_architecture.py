"""The package's own structure: which part may import which, and what an import costs."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_pyao

ROOT = Path(hf_pyao.__file__).parent

FLOORS = (
    "ground",
    "engine",
    "plan",
    "model",
    "auto",
    "attachment",
    "hf",
    "entrance",
    "tools",
    "cli",
)
"""From the bottom up: each imports itself and those before it. A folder is a floor; ``settings`` and
the modules beside the folders are the ground, apart from ``attachment``, ``cli``, and ``__init__``, the entrance: it
names what all floors below it have."""

ONLY_TORCH = ("ground", "engine", "plan", "model", "auto")
"""Floors that import neither transformers nor accelerate, not even inside a function."""

USE_TRANSFORMERS = {
    "model/fake_cuda/cuda_choices.py",
    "auto/install/conflicts.py",
}
"""Files of those floors that do."""

MOST_FILES = 25
"""Most Python files in a folder."""

LAZY = {"engine/codecs/kernels.py": {"triton"}}
"""Files that are themselves imported only where an optional package is there."""


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":
        return "entrance"
    return part if part in FLOORS else "ground"


def room_of(path: Path) -> str:
    """Return the folder of a file; of those beside the floors, what :func:`floor_of` returns."""
    folder = path.parent.relative_to(ROOT).as_posix()
    return floor_of(path) if folder in (".", "settings") else folder


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(
    path: Path, *, at_import_only: bool = False, also_types: bool = False
) -> tuple[str, ...]:
    """Return the modules that a file imports; those for type checkers alone only if *also_types*."""
    return tuple(_walk_imports(path, at_import_only, also_types))


def _walk_imports(path: Path, at_import_only: bool, also_types: bool) -> Iterator[str]:
    pending: list[ast.AST] = [tree_of(path)]
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
            for alias in node.names:  # a module of a package, or a name in a module
                whole = f"{node.module}.{alias.name}"
                is_public = node.module == "hf_pyao"  # what counts is where it lives
                home = hf_pyao._HOMES.get(alias.name, node.module) if is_public else node.module
                yield whole if whole in MODULES else home
        pending.extend(ast.iter_child_nodes(node))


FILES = sorted(
    path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"
)


MODULES = {_module_of(path): path for path in [*FILES, ROOT / "__init__.py"]}


def test_every_folder_is_a_floor() -> None:
    folders = {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))}
    assert folders <= {*FLOORS, "settings"}, "a new folder belongs on one of the floors"


def test_folders_are_small() -> None:
    for folder in {path.parent for path in FILES}:
        num_files = len(list(folder.glob("*.py")))
        assert num_files <= MOST_FILES, f"{folder} has {num_files} files; make rooms of it"


def test_imports_point_down() -> None:
    """Those for type checkers alone, and those inside of functions, count too."""
    for path in MODULES.values():
        rank = FLOORS.index(floor_of(path))
        for module in imports_of(path, also_types=True):
            if module in MODULES:
                floor = floor_of(MODULES[module])
                assert FLOORS.index(floor) <= rank, f"{path} may not import {module}: {floor}"


def test_no_rooms_import_each_other_in_a_ring() -> None:
    """Types may be named both ways: a protocol for one implementer would hide that, no more."""
    graph: dict[str, set[str]] = {room_of(path): set() for path in MODULES.values()}
    for path in MODULES.values():
        for module in imports_of(path):
            if module in MODULES:
                graph[room_of(path)] |= {room_of(MODULES[module])} - {room_of(path)}
    done: set[str] = set()
    for room in sorted(graph):
        _walk(room, graph, [], done)


def test_the_lower_floors_import_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "hf_pyao", "triton", "numpy"}
    for path in FILES:
        is_one = path.relative_to(ROOT).as_posix() in USE_TRANSFORMERS
        if floor_of(path) in ONLY_TORCH and not is_one:
            for module in imports_of(path):
                assert module.split(".")[0] in allowed, f"{path} imports {module}"


def test_the_schedule_is_arithmetic() -> None:
    """It knows neither torch nor the rest of the package: the predictor uses it too."""
    for name in ("schedule.py", "ring_schedule.py"):
        found = set(imports_of(ROOT / "engine" / "transfer" / name, also_types=True))
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
    assert issubclass(hf_pyao.ConfigError, hf_pyao.PyAOError)
    with pytest.raises(AttributeError, match=r"no attribute 'PyA0Config'; it has .*PyAOConfig"):
        _ = hf_pyao.PyA0Config


def test_no_imports_go_in_a_circle() -> None:
    """Those inside of functions count too; those for type checkers alone do not."""
    names = {_module_of(path): path for path in ROOT.rglob("*.py")}
    graph = {
        name: {target for module in imports_of(path) if (target := module) in names}
        for name, path in names.items()
        if name != "hf_pyao"  # which names the public ones, lazily
    }
    for name in graph:
        graph[name] = {target for target in graph[name] if target in graph}
    done: set[str] = set()
    for start in sorted(graph):
        path: list[str] = []
        _walk(start, graph, path, done)


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

HELD = ("engine", "plan", "model", "auto", "attachment", "hf")
"""Floors whose classes are written at home alone: no other file of these floors assigns an attribute
that one of their classes has."""

FIGURES = {
    "engine/stores/disk_figures.py": {"DiskFigures"},
    "engine/stores/store.py": {"DiskMeter"},
    "engine/transfer/transport.py": {"CopiedSoFar", "LinkMeter", "LinkTimes"},
    "engine/weights/figures.py": {"UploadFigures", "OnDemandFigures"},
    "metrics.py": {"MicroBatchStats"},
}
"""Classes that others count in; nothing is decided by their numbers."""

HOLD_FIGURES = {"counts", "_counts", "figures", "meter", "stats", "times"}
"""What objects of these classes are called where others count in them."""

FOREIGN = {
    *("data", "requires_grad", "grad", "forward"),
    *("_parameters", "_buffers", "_modules"),
}
"""Attributes of torch's that have the name of one of ours."""

CHANGES = {"append", "extend", "add", "clear", "pop", "popleft", "remove", "discard", "update"}

WRITTEN_ELSEWHERE = {
    # Sets, lists and tables that pack hooks write in the hottest path there is.
    ("engine/runtime/packing.py", "saved_shapes"),
    ("engine/runtime/packing.py", "casts"),
    ("engine/runtime/packing.py", "records"),
    ("engine/runtime/packing.py", "put_off"),
    ("engine/runtime/engine.py", "weights"),  # of its two sides
    ("engine/runtime/packing.py", "table"),  # asked, by its own methods
    ("engine/recompute/tracing.py", "outputs"),  # of an operation, each time that one has run
    ("engine/stores/host_pool.py", "use"),  # of a buffer: whom the pool has lent it to
    # A dictionary for what users add to a report; it is public.
    *((file, "report_extra") for file in ("auto/offloader.py", "hf/callback.py")),
    ("plan/documents/run.py", "report_extra"),
}
"""Files that write an attribute of a class of another file all the same."""


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


def written_outside(
    tree: ast.Module, elsewhere: set[str], own: set[str]
) -> Iterator[tuple[ast.AST, ast.Attribute]]:
    """Yield where *tree* writes attributes of *elsewhere* that are not its own classes' too."""
    for node in ast.walk(tree):
        written = list(targets_of(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES and isinstance(node.func.value, ast.Attribute):
                written = [node.func.value]
        for target in written:
            holder = ast.unparse(target.value).rpartition(".")[2]
            is_own = isinstance(target.value, ast.Name) and holder in ("self", "cls", "ctx")
            counts = holder in HOLD_FIGURES and target.attr in names_of_figures()
            if target.attr in elsewhere - own and not is_own and not counts:
                yield node, target


@functools.cache
def names_of_figures() -> frozenset[str]:
    found = (_attributes_by_class(ROOT / path)[each] for path, of in FIGURES.items() for each in of)
    return frozenset().union(*found)


def test_state_is_written_at_home_alone() -> None:
    held = [path for path in FILES if floor_of(path) in HELD]
    names = {path: path.relative_to(ROOT).as_posix() for path in held}
    states = {path: attributes_of_all_classes(path, changeable=True) for path in held}
    assert sum(map(bool, states.values())) > 200
    used = set()
    for path in held:
        elsewhere = {name for home in held if home != path for name in states[home]}
        own = attributes_of_all_classes(path)
        for node, target in written_outside(tree_of(path), elsewhere, own):
            key = names[path], target.attr
            assert key in WRITTEN_ELSEWHERE, (
                f"{names[path]}:{node.lineno} writes {ast.unparse(target)}: "  # type: ignore[attr-defined]
                "give its class a method that does it"
            )
            used.add(key)
    assert used == WRITTEN_ELSEWHERE, "an exception that nothing needs"


def test_a_writer_from_outside_is_found() -> None:
    elsewhere = {"state", "items"}
    for line in ("it.state = 1", "it.items.append(1)", "del it.state", "a, it.items[0] = 1, 2"):
        assert len(list(written_outside(ast.parse(line), elsewhere, set()))) == 1, line
    for line in ("self.state = 1", "it.other = 1", "it.items.index(1)", "state = 1"):
        assert not list(written_outside(ast.parse(line), elsewhere, set())), line


@functools.cache
def _attributes_by_class(path: Path, *, changeable: bool = False) -> dict[str, set[str]]:
    tree = tree_of(path)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: attributes_of(tree, {node.name})
        for node in classes
        if not (changeable and is_frozen(node))
    }


def is_frozen(node: ast.ClassDef) -> bool:
    """Say whether a class is a frozen dataclass or a named tuple, which Python itself protects."""
    bases = {ast.unparse(base) for base in node.bases}
    return "NamedTuple" in bases or any(
        "frozen=True" in ast.unparse(d) for d in node.decorator_list
    )


def attributes_of_all_classes(path: Path, *, changeable: bool = False) -> set[str]:
    """Return the attributes of the classes of a file; of those that may change, if *changeable*."""
    return set().union(*_attributes_by_class(path, changeable=changeable).values())


# What torch forbids its own offloading to use: memory stays fragmented (record_stream), or the whole
# device stands still (synchronize). Only transports may know of streams at all.
FORBIDDEN = ("record_stream", "synchronize", "empty_cache")

ALLOWED = (
    ("stream_transport.py", "ticket.end.synchronize"),
    ("compute_streams.py", "tensor.record_stream"),
)
"""A disk's thread waits for the event of one copy; no stream and no device does. A stream that only
looks at a tensor of another one is told to the allocator."""


def test_the_engine_waits_for_events_alone() -> None:
    for path in FILES:
        if floor_of(path) == "engine":
            for node in ast.walk(tree_of(path)):
                is_asked = isinstance(node, ast.Attribute)
                if is_asked and (path.name, ast.unparse(node)) not in ALLOWED:
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


# ---- the pages beside the code -------------------------------------------------------------------------

REPOSITORY = ROOT.parent

FILES_OF_OTHERS = {"run_clm.py", "run_clm_no_trainer.py", "train.py"}
"""Scripts of transformers, and of users, that pages name."""


@functools.cache
def pages() -> dict[Path, str]:
    """Return the text of each Markdown page, by its path."""
    found = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    for folder in ("hf_pyao", "tests", "recipes"):
        found += sorted((REPOSITORY / folder).rglob("*.md"))
    return {page: page.read_text(encoding="utf-8") for page in found}


def exists(name: str, page: Path) -> bool:
    """Say whether *page* names a file or folder: from beside it, the package or the repository.

    In the folders a bare name may also stand for a file further down.
    """
    if any((base / name).exists() for base in (page.parent, ROOT, REPOSITORY)):
        return True
    return page.parent != REPOSITORY and any(page.parent.rglob(name.lstrip("./")))


def test_pages_name_files_that_exist() -> None:
    for page, text in pages().items():
        # `COMMIT:PATH` names a file of another commit.
        files = re.findall(r"(?<![\w./{*:])([\w./]*\w\.py)\b", text)
        folders = re.findall(r"`((?:[\w.]+/)+)`", text)
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
        for name in {*files, *folders, *links} - FILES_OF_OTHERS:
            assert exists(name, page), f"{page} names {name}, which is not there"


def test_each_file_is_named_on_a_page_beside_it() -> None:
    """On that of its folder, or of one above; CONTRIBUTING names those outside of folders."""
    for path in FILES:
        above = [folder for folder in path.parents if ROOT in (folder, *folder.parents)]
        texts = [text for page, text in pages().items() if page.parent in above]
        if path.parent == ROOT:
            texts.append(pages()[REPOSITORY / "CONTRIBUTING.md"])
        is_named = any(re.search(rf"\b{path.name}\b", text) for text in texts)
        assert path.name == "__init__.py" or is_named, (
            f"no page names {path.relative_to(REPOSITORY)}: give it a row in the README of its "
            "folder, or of the floor"
        )


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
