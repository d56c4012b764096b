"""Packages that are installed and broken: the doctor goes on and names them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pyao.tools.bench import processes
from hf_pyao.tools.bench.peers import MethodUnavailable, need_package
from hf_pyao.tools.bench.processes import broken_packages
from hf_pyao.tools.packages import Broken, import_failure, is_installed

ROOT = Path(__file__).parents[3]
MISMATCH = "operator torchvision::nms does not exist"
CONTENTS = {
    "pyao_raises": f"raise RuntimeError({MISMATCH!r})",
    "pyao_needs_it": "try:\n    import pyao_raises\nexcept Exception as e:\n    raise OSError('no') from e",
    "pyao_no_library": "raise OSError('libcudart.so.11: cannot open\\n\\x1b[31m shared object')",
    "pyao_lacks": "import pyao_is_not_there",
    "pyao_no_python": "def broken(:",
    "pyao_aborts": "import os; os.abort()",
    "pyao_exits": "raise SystemExit(3)",
    "pyao_works": "",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with packages that break in their own ways."""
    for name, content in CONTENTS.items():
        install(tmp_path, name, content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(processes, "PRELOAD", [])
    importlib.invalidate_caches()
    return tmp_path


def install(folder: Path, name: str, content: str) -> None:
    """Put a package there that looks installed."""
    for part in (folder / name, folder / f"{name}-9.9.0.dist-info"):
        part.mkdir(parents=True)
    (folder / name / "__init__.py").write_text(content)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.0\n"
    (folder / f"{name}-9.9.0.dist-info" / "METADATA").write_text(metadata)


@pytest.mark.parametrize(
    ("name", "package", "reason"),
    [
        ("pyao_raises", "pyao_raises", f"RuntimeError: {MISMATCH}"),
        ("pyao_needs_it", "pyao_raises", f"RuntimeError: {MISMATCH}"),
        ("pyao_no_library", "pyao_no_library", "OSError: libcudart.so.11: cannot open"),
        ("pyao_lacks", "pyao_lacks", "ModuleNotFoundError: No module named 'pyao_is_not_there'"),
        ("pyao_no_python", "pyao_no_python", "SyntaxError: invalid syntax (__init__.py, line 1)"),
    ],
)
def test_the_package_at_fault_is_named(
    name: str, package: str, reason: str, packages: Path
) -> None:
    assert import_failure(name) == Broken(package, reason)


def test_what_works_or_is_absent_is_not_broken(packages: Path) -> None:
    assert import_failure("pyao_works") is None
    assert is_installed("pyao_raises.part")
    assert not is_installed("pyao_is_not_there")


@pytest.mark.thorough
def test_one_that_takes_the_process_down_costs_no_more(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.START_METHOD_VARIABLE, "spawn")  # a server has another path
    names = ("pyao_aborts", "pyao_works", "pyao_needs_it", "pyao_raises", "not_there", "pyao_exits")
    found = {broken.package: broken.reason for broken in broken_packages(names)}
    assert set(found) == {"pyao_aborts", "pyao_raises", "pyao_exits"}
    assert "SIGABRT" in found["pyao_aborts"]
    assert found["pyao_raises"] == f"RuntimeError: {MISMATCH}"
    assert found["pyao_exits"].startswith("exit status 3")


def test_a_method_of_a_broken_package_cannot_run(packages: Path) -> None:
    with pytest.raises(MethodUnavailable, match=r"It: pyao_raises cannot be imported \(RuntimeErr"):
        need_package("pyao_needs_it", "It")


def run_with(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "hf_pyao.cli", *argv],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["torchvision", "accelerate", "matplotlib", "rich", "triton"])
def test_doctor_and_bench_with_a_broken_package(package: str, tmp_path: Path) -> None:
    install(tmp_path, package, f"raise RuntimeError({MISMATCH!r})")
    doctor = run_with(tmp_path, "doctor", "--device", "cpu")
    assert doctor.returncode == 0, doctor.stderr
    assert "Traceback" not in doctor.stderr
    advice = [line for line in doctor.stdout.splitlines() if f"- {package} cannot be imp" in line]
    assert len(advice) == 1
    assert MISMATCH in advice[0]
    argv = ("bench", "--smoke", "--device", "cpu", "--methods", "none", "--output", "x.json")
    bench = run_with(tmp_path, *argv)
    if bench.returncode:  # transformers imports some of them
        assert bench.returncode == 2
        assert "Traceback" not in bench.stderr
        (line,) = [line for line in bench.stderr.splitlines() if line.startswith("pyao:")]
        assert f"pyao: no model can be built: {package} cannot be imported (RuntimeE" in line
    else:
        assert (tmp_path / "x.json").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("argv", [("doctor",), ("bench", "--smoke")])
def test_without_torch_nothing_else_is_said(argv: tuple[str, ...], tmp_path: Path) -> None:
    install(tmp_path, "torch", "raise OSError('libcudart.so.11: cannot open shared object file')")
    done = run_with(tmp_path, *argv)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("pyao: torch cannot be imported (OSError: libcudart.so.11: cannot open")
