"""Runs trials in processes of their own, so that one that hangs, crashes or leaks costs one row.

Processes are forked from a server that has imported torch and transformers and touched no device,
which spares each of them the imports (multiprocessing's ``forkserver``); where there is no fork,
each starts from nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hf_pyao
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import CRASHED, TIMED_OUT, BenchRow
from hf_pyao.plan.documents.schema import read_fields
from hf_pyao.text import one_line
from hf_pyao.tools.bench.methods import find_method
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.packages import CHECKED, REMEDY, Broken, import_failure, is_installed

PRELOAD = ["hf_pyao.tools.bench.preload"]
SERVER = "hf_pyao.tools.bench.worker:serve"
PROBE = "hf_pyao.tools.bench.worker:serve_probe"
IMPORTER = "hf_pyao.tools.packages:serve_imports"
START_METHOD_VARIABLE = "PYAO_BENCH_START_METHOD"
"""Environment variable that chooses another of multiprocessing's start methods: ``spawn``, if
forked processes cannot reach the device."""

TAIL_LINES = 3
"""Lines of a crashed process's output that its row shows."""

IMPORT_TIMEOUT_S = 120.0
"""Most time to import one package."""

PROBE_TIMEOUT_S = 120.0
"""Most time to import and to look at the device; with cold files imports alone take most of a
minute. What takes longer is a driver that hangs."""

START_TIMEOUT_S = 300.0
"""Most time to import, reach the device and build the model."""


def run_trials(
    setup: BenchSetup, trials: Sequence[Trial], *, timeout_s: float, server: str = SERVER
) -> Iterator[BenchRow]:
    """Measure each of *trials* in a process of its own, and yield each row as it comes.

    A trial that takes longer than *timeout_s*, or takes the process down, gets a row that says so.
    *server* is what the process runs, as ``module:function``.

    Raises:
        ConfigError: there is no model to measure: the device or the model cannot be had.
    """
    for trial in trials:
        with Child(server, setup, [trial]) as child:
            _, message = child.receive(START_TIMEOUT_S)
            if not isinstance(message, Failure):
                _, message = child.receive(timeout_s)
            if isinstance(message, Failure):
                yield BenchRow(
                    method=trial.method,
                    label=find_method(trial.method).label,
                    status=message.status,
                    reason=message.reason,
                    micro_batch=trial.micro_batch,
                )
            else:
                yield read_fields(BenchRow, message, f"the row of {trial.method}")


def broken_packages(names: Sequence[str] = CHECKED, server: str = IMPORTER) -> list[Broken]:
    """Return the packages, of those installed, that cannot be imported; each is named once.

    They are imported in a process of its own, so that one that takes it down costs no more.
    """
    broken: list[Broken] = []
    todo = [name for name in names if is_installed(name)]
    while todo:
        with Child(server, tuple(todo)) as child:
            while todo:
                name = todo.pop(0)
                _, found = child.receive(IMPORT_TIMEOUT_S)
                if isinstance(found, Failure):
                    broken.append(Broken(name.split(".")[0], found.reason))
                    break
                if found is not None and found not in broken:
                    broken.append(found)
    return broken


Facts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A device's description, its link's speeds, its own speeds."""


def probe(device: str, *, with_speeds: bool) -> Facts:
    """Return what a process of its own finds: the device's description, and speeds if asked for.

    Raises:
        ConfigError: the device cannot be had.
    """
    with Child(PROBE, device, with_speeds) as child:
        _, message = child.receive(PROBE_TIMEOUT_S)
    if isinstance(message, Failure):
        raise ConfigError(f"device {device!r} cannot be looked at: {message}", key="bench-process")
    facts: Facts = message
    return facts


@dataclass(frozen=True)
class Failure:
    """What came instead of a message."""

    status: str
    reason: str

    def __str__(self) -> str:
        return self.reason


class Child:
    """A measuring process and the line to it. *target* is ``module:function``."""

    def __init__(self, target: str, *args: Any) -> None:
        context = _context()
        descriptor, log_path = tempfile.mkstemp(prefix="pyao-bench-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log_path)
        self._line, far_end = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_enter, args=(target, log_path, far_end, *args), daemon=True
        )
        self._process.start()
        far_end.close()

    def receive(self, timeout_s: float) -> tuple[str, Any]:
        """Return the next message, or what happened instead of one.

        Raises:
            ConfigError: the process says that there is nothing to measure.
        """
        try:
            if not self._line.poll(max(0.0, timeout_s)):
                self._process.kill()
                return "", Failure(TIMED_OUT, f"stopped after {timeout_s:.0f} s")
            kind, message = self._line.recv()
        except (EOFError, ConnectionResetError):
            return "", self._crash()
        if kind == "broken":
            raise ConfigError(message, key="bench-process")
        return kind, message

    def _crash(self) -> Failure:
        self._process.join(10)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (the system's way to say that host memory ran out)"
        else:
            how = f"exit status {code}"
        return Failure(CRASHED, " | ".join([how, *self._tail()]))

    def _tail(self) -> list[str]:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [one_line(line) for line in lines if line.strip()][-TAIL_LINES:]

    def __enter__(self) -> Child:
        """Return the process, running already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process, at once if an error came, and remove its log."""
        self._line.close()
        self._process.join(5 if kind is None else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._log.unlink(missing_ok=True)


def _enter(target: str, log_path: str, line: Connection, *args: Any) -> None:
    """Run *target* in the child, which alone imports its module, with the line to the parent."""
    _send_output_to(log_path)
    module, _, name = target.partition(":")
    failure = import_failure(module)
    if failure is not None:
        line.send(("broken", f"{failure}. {REMEDY}"))
        return
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    function(line, *args)


def _send_output_to(log_path: str) -> None:
    """Send what this process and its libraries print to a file, whose end a crash's row shows."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _context() -> Any:
    """Return the way to start processes, its server running."""
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    method = os.environ.get(START_METHOD_VARIABLE) or ("forkserver" if can_fork else "spawn")
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        from multiprocessing import forkserver

        context.set_forkserver_preload(PRELOAD)
        with _environment():
            forkserver.ensure_running()
    return context


@contextmanager
def _environment() -> Iterator[None]:
    """Let the server of processes find this hf_pyao, installed or not, and touch no device."""
    here = str(Path(hf_pyao.__file__).resolve().parents[1])
    before = dict(os.environ)
    path = before.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = here if not path else os.pathsep.join([here, path])
    # A library that asks for CUDA while it is imported must not initialise it: a process cannot
    # be forked after that. With this torch asks the driver's management library instead.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
