"""The parts of the GPU day in their order, and what runs in the process of each."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from on_gpu import rows as rows_of
from on_gpu.rows import Row

if TYPE_CHECKING:
    from on_gpu.measure import Figures, Lab

REPOSITORY = Path(__file__).resolve().parents[2]
FIRST, SECOND, LATER = "first", "second", "later"
"""The two commands of a day of fifteen minutes, and what is for another day."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a part's process is asked for."""

    part: str
    device: str
    is_smoke: bool
    output: Path
    """The folder of the results, for what a part writes by itself."""
    limit_s: float
    done: frozenset[str] = frozenset()
    """Names of tasks that need not run."""


@dataclass(frozen=True)
class Task:
    """One line of the results."""

    name: str
    run: Callable[[Lab], Figures]
    may_run_out: bool = False
    setup: Mapping[str, Any] = field(default_factory=dict)
    """What it measures, for the line."""


@dataclass(frozen=True)
class Part:
    """What one process does."""

    summary: str
    seconds: int
    """Expected on an H100."""
    command: str
    tasks: Callable[[Request], list[Task]]
    is_expandable: bool = False
    """With ``expandable_segments:True``."""

    @property
    def limit_s(self) -> float:
        """Most seconds that it may take."""
        return max(2.0 * self.seconds, self.seconds + 60.0)


# ---- tasks ---------------------------------------------------------------------------------------


def _steps(rows: Callable[[], list[Row]]) -> Callable[[Request], list[Task]]:
    def tasks(request: Request) -> list[Task]:
        return [_step(row, request) for row in rows()]

    return tasks


def _step(row: Row, request: Request) -> Task:
    measured = rows_of.smoke(row) if request.is_smoke else row

    def run(lab: Lab) -> Figures:
        from on_gpu.measure import measure

        return measure(measured, lab)

    return Task(row.name, run, row.may_run_out, {"published": dict(row.published)})


def _facts(request: Request) -> list[Task]:
    from on_gpu import tasks

    return [
        Task("A: device", tasks.device_facts),
        Task("A: link", tasks.link_speeds),
        Task("A: products and copies", tasks.device_speeds),
        Task("A: pinning", tasks.host_memory),
    ]


def _bits(request: Request) -> list[Task]:
    from on_gpu import tasks

    return [
        Task(
            f"C: {architecture}, {way}, {'deterministic' if is_deterministic else 'as usual'}",
            partial(
                tasks.same_bits,
                architecture=architecture,
                way=way,
                is_deterministic=is_deterministic,
                tokens=_tokens(request),
            ),
        )
        for architecture in tasks.SMALL
        for way in tasks.COMPARED
        for is_deterministic in (True, False)
    ]


def _watched_bits(request: Request) -> list[Task]:
    from on_gpu import tasks

    watched = partial(tasks.watched_bits, tokens=_tokens(request))
    return [
        Task(f"D2: llama, {way}, streams watched", partial(watched, way=way))
        for way in list(tasks.COMPARED)[1:7:2]
    ]


def _tokens(request: Request) -> int:
    return 16 if request.is_smoke else 256


def _workspaces(request: Request) -> list[Task]:
    from on_gpu import tasks

    return [
        Task(
            f"E: {kernel}, {'x'.join(map(str, shape[:5]))}, dropout {shape[5]:g}",
            partial(tasks.workspace, kernel=kernel, shape=shape),
        )
        for shape in tasks.SHAPES
        for kernel in tasks.KERNELS
    ]


def _trace(request: Request) -> list[Task]:
    from on_gpu import tasks

    row = next(row for row in rows_of.ratio_rows() if row.way == "all")
    measured = rows_of.smoke(row) if request.is_smoke else row
    trace = request.output / "trace.json.gz"
    return [Task(f"I: {row.name}", lambda lab: tasks.traced_step(lab, measured, trace))]


def _host(request: Request) -> list[Task]:
    from on_gpu import tasks

    return [Task("J: host time of a saved tensor", tasks.host_cost)]


def _others(request: Request) -> list[Task]:
    from on_gpu import tasks

    chunk = {"published": {"ours_ms": 3.86, "ours_peak_gb": 3.03, "before_ms": 23.37}}
    name = "M: TRL 1.13's chunk of the loss, 256 x 248,320 x 2,048"
    return [Task(name, tasks.loss_chunk, setup=chunk), *_steps(rows_of.others_rows)(request)]


# ---- tests ---------------------------------------------------------------------------------------


def _tests(
    name: str, *arguments: str, everywhere: bool = False, allocator: str = ""
) -> Callable[[Request], list[Task]]:
    def tasks(request: Request) -> list[Task]:
        def run(lab: Lab) -> Figures:
            files = arguments or files_with_gpu_tests(everywhere=everywhere)
            return run_tests(files, request, allocator=allocator)

        return [Task(name, run)]

    return tasks


def run_tests(files: Sequence[str], request: Request, *, allocator: str = "") -> Figures:
    """Run the tests marked ``gpu`` in *files*, each outcome a line of ``tests.txt`` as it comes."""
    if importlib.util.find_spec("pytest") is None:
        return {"outcome": "not run: pytest is not installed"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    )
    if request.device == "cpu":
        environment["HF_PYAO_GPU_DRY_RUN"] = "1"
    if allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    # -W default: a warning that another release gives must not waste a lease.
    options = ["-m", "gpu", "-v", "--no-header", "--tb=short", "-W", "default"]
    options += ["-p", "no:cacheprovider"]
    options.append("--continue-on-collection-errors")  # a package that is missing costs its file
    if len(files) > 3 and importlib.util.find_spec("xdist") is not None:
        options += ["-n", "2" if request.is_smoke else "4"]
    command = [sys.executable, "-m", "pytest", *files, *options]
    log = request.output / "tests.txt"
    start, begin = time.perf_counter(), log.stat().st_size if log.exists() else 0
    with log.open("a", encoding="utf-8") as out:
        try:
            subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, request.limit_s - 5.0),
                check=False,
            )
            ended = ""
        except subprocess.TimeoutExpired:
            ended = f"stopped after {time.perf_counter() - start:.0f} s"
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    return count_outcomes(text.splitlines(), ended, may_skip=request.is_smoke)


def files_with_gpu_tests(*, everywhere: bool, root: Path = REPOSITORY) -> list[str]:
    """Return the test files that mark something ``gpu``: those of ``tests/gpu``, others behind."""
    found = sorted((root / "tests" / "gpu").glob("test_*.py"))
    if everywhere:
        rest = sorted((root / "tests").rglob("test_*.py"))
        found += [path for path in rest if path not in found]
    return [str(path) for path in found if "mark.gpu" in path.read_text(encoding="utf-8")]


def count_outcomes(lines: Sequence[str], ended: str = "", *, may_skip: bool = False) -> Figures:
    """Count what the lines of ``pytest -v`` say; *ended* tells if it was stopped.

    Tests that are all skipped are wrong on a device: they are what it was asked for.
    """
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    failures = []
    for line in lines:
        words = line.split()
        # "tests/a.py::test PASSED [ 3%]", or with xdist "[gw0] [ 3%] PASSED tests/a.py::test".
        found = next((word for word in words[:4] if word in counts), None)
        if found is None or "::" not in line or line.startswith(("FAILED", "ERROR", "SKIPPED")):
            continue  # the summary says it again
        counts[found] += 1
        if found in ("FAILED", "ERROR"):
            failures.append(next(word for word in words if "::" in word))
    num_fine = counts["PASSED"] + counts["SKIPPED"] * may_skip
    is_wrong = bool(failures) or not num_fine
    return {
        "outcome": ended or ("failed" if is_wrong else "passed"),
        "is_right": not is_wrong,
        **{f"num_{name.lower()}": count for name, count in counts.items()},
        "failures": failures,
        "tail": [line for line in lines if line.strip()][-3:] if is_wrong else [],
    }


_RESERVED = "tests/gpu/test_reserved_on_device.py"
_RACES = (
    "tests/gpu/test_no_synchronise.py",
    "tests/gpu/test_stream_races.py::test_a_missing_wait_shows",
    "tests/gpu/test_stream_races.py",
)
"""The longest last: its cases are many, and some may be cut off."""


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "A": Part("the device, its link, its speeds, pinning", 40, FIRST, _facts),
        "B": Part(
            "the allocator beside its replay, in a process of its own",
            15,
            FIRST,
            _tests("B: allocator", _RESERVED),
        ),
        "B2": Part(
            "the same with expandable segments",
            13,
            FIRST,
            _tests("B2: allocator", _RESERVED, allocator="expandable_segments:True"),
        ),
        "C": Part("bits of small models, with and without deterministic kernels", 70, FIRST, _bits),
        "D": Part(
            "races with sleeping kernels, and that nothing synchronises",
            30,
            FIRST,
            _tests("D: races", *_RACES),
        ),
        "D2": Part("three rows of C under torch's CUDA sanitizer", 15, FIRST, _watched_bits),
        "E": Part("what kernels of attention allocate inside", 12, FIRST, _workspaces),
        "F": Part("speed in bf16 without a cap", 125, FIRST, _steps(rows_of.speed_rows)),
        "H": Part(
            "an RTX 4070's ratio of compute to link: fp32 without TF32",
            60,
            FIRST,
            _steps(rows_of.ratio_rows),
        ),
        "I": Part("a trace of one step", 15, FIRST, _trace),
        "J": Part("the host's part", 12, FIRST, _host),
        "G": Part(
            f"predicted largest micro-batches within {rows_of.CAP_GIB} GiB",
            50,
            FIRST,
            _steps(lambda: rows_of.cap_rows("G")),
        ),
        "G2": Part(
            "OPT's with expandable segments",
            13,
            FIRST,
            _steps(lambda: rows_of.cap_rows("G2")),
            is_expandable=True,
        ),
        "K": Part(
            "adapters on Llama-8B, resident and streamed", 75, SECOND, _steps(rows_of.adapter_rows)
        ),
        "L": Part(
            "65,536 tokens with adapters on Llama-8B, within 24 GB",
            45,
            SECOND,
            _steps(rows_of.headline_rows),
            is_expandable=True,
        ),
        "M": Part("figures of others: transformers, TRL, axolotl", 60, SECOND, _others),
        "N": Part("all tests marked gpu", 50, SECOND, _tests("N: tests", everywhere=True)),
        "O": Part(
            "figures of others: torchtune, Unsloth, torchtitan",
            230,
            LATER,
            _steps(rows_of.later_rows),
        ),
        "P": Part(
            "524,288 tokens on two layers of Llama-8B",
            80,
            LATER,
            _steps(rows_of.limit_rows),
            is_expandable=True,
        ),
    }
)
"""By name, in the order of their worth."""


# ---- the process ---------------------------------------------------------------------------------


def serve(connection: Connection, request: Request) -> None:
    """Run the tasks of a part in this process, and send what comes of each.

    Sends ``("begin", name)`` and ``("line", fields)`` for each task, and ``("end", None)``. After
    an error of the device it ends without that: what follows in this process could not be trusted.
    """
    part = PARTS[request.part]
    # cuBLAS reads it when its handle is made; deterministic products need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if part.is_expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    from on_gpu.measure import Lab

    lab = Lab.on(request.device, is_smoke=request.is_smoke)
    if part.is_expandable and lab.device.type == "cuda":
        import torch

        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    for task in part.tasks(request):
        if task.name in request.done:
            continue
        connection.send(("begin", task.name))
        line, is_usable = _line_of(task, lab)
        connection.send(("line", line))
        if not is_usable:
            return
        lab.clean()
    connection.send(("end", None))


def _line_of(task: Task, lab: Lab) -> tuple[dict[str, Any], bool]:
    """Return the line of a task, and whether the device can be used after it."""
    from hf_pyao.plan.documents.bench import FAILED, OK, OUT_OF_MEMORY, UNAVAILABLE
    from hf_pyao.tools.bench.methods import MethodUnavailable
    from hf_pyao.tools.bench.worker import describe_error, is_out_of_memory

    line: dict[str, Any] = {"name": task.name, "status": OK, "setup": dict(task.setup)}
    start = time.perf_counter()
    is_usable = True
    try:
        line["figures"] = task.run(lab)
    except MethodUnavailable as error:
        line |= {"status": UNAVAILABLE, "reason": str(error)}
    except Exception as error:
        is_out = is_out_of_memory(error)
        if not is_out:
            traceback.print_exc()
            is_usable = "CUDA error" not in str(error)
        status = OUT_OF_MEMORY if is_out else FAILED
        line |= {"status": status, "reason": describe_error(error)}
    if task.may_run_out:
        line["was_expected_to_run_out"] = True
    return line | {"wall_s": round(time.perf_counter() - start, 2)}, is_usable
