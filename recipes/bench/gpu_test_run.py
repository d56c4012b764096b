"""Runs the tests marked ``gpu`` in a process of their own, and counts what came of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]


def run_gpu_tests(*, is_dry_run: bool, timeout_s: float) -> dict[str, Any]:
    """Run the tests marked ``gpu`` and return named facts, ``outcome`` first.

    A dry run takes one case of each, on its stand-in for a GPU.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"outcome": "not run: pytest is not installed"}
    files = files_with_gpu_tests(REPOSITORY / "tests", everywhere=not is_dry_run)
    # Not the settings of a pytest that may be running this.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    if is_dry_run:
        environment["HF_PYAO_GPU_DRY_RUN"] = "1"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        # -W default: a warning that another release gives must not waste a lease.
        options = ("-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *files, *options, f"--junitxml={junit}"]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": f"stopped after {time.perf_counter() - start:.0f} s"}
        wall_s = round(time.perf_counter() - start, 1)
        if not junit.is_file():
            return {"outcome": f"pytest ended with status {done.returncode}", "tail": _tail(done)}
        return {**count_outcomes(junit.read_text(encoding="utf-8")), "wall_s": wall_s}


def files_with_gpu_tests(folder: Path, *, everywhere: bool) -> list[str]:
    """Return the test files that mark something ``gpu``: others may need packages not here."""
    pattern = "test_*.py" if everywhere else "gpu/test_*.py"
    found = sorted(folder.rglob(pattern))
    return [str(path) for path in found if "mark.gpu" in path.read_text(encoding="utf-8")]


def count_outcomes(junit: str) -> dict[str, Any]:
    """Return the counts and the failures in a JUnit report."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    bad = [
        (case, problem)
        for case in cases
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    num_passed = len(cases) - num_skipped - len({id(case) for case, _ in bad})
    failures = [
        f"{case.get('classname')}::{case.get('name')}: "
        + ((problem.get("message") or "").strip().splitlines() or ["no message"])[0]
        for case, problem in bad
    ]
    outcome = "failed" if bad else "passed" if num_passed else "none ran"
    return {
        "outcome": outcome,
        "num_passed": num_passed,
        "num_failed": len(failures),
        "num_skipped": num_skipped,
        "failures": failures,
    }


def _tail(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-8:]
