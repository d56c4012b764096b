"""Runs parts in processes of their own, and writes each line down as it comes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pyao.plan.documents.bench import CRASHED, FAILED, NOT_REACHED, OK, OUT_OF_MEMORY, TIMED_OUT
from hf_pyao.tools.bench.processes import Child, Failure
from on_gpu.parts import PARTS, Request

SERVE = "on_gpu.parts:serve"
FIGURES = "day.jsonl"
LEAST_S = 5.0
"""A part is not begun with less time than this."""

BEGIN_S = 60.0
"""Most until a process is at its first task: a driver that hangs must not eat the day."""

SMOKE_LIMIT_S = 900.0
"""Most for a part on a CPU, which is no measure of a GPU's time."""

Line = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Deadline:
    """When all must be done, on the monotonic clock; None: never."""

    at_s: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline that is *seconds* from now."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    def left_s(self) -> float:
        """Return the seconds that are left; infinite without a deadline."""
        return float("inf") if self.at_s is None else self.at_s - time.monotonic()


class Journal:
    """All lines of a day, and the file that they are appended to.

    A line that cannot be written, as the disk is full, is kept and written with the next one. It
    is printed too, so that whoever keeps the output has it in any case.
    """

    def __init__(self, path: Path, progress: Progress) -> None:
        self.lines: list[Line] = []
        self._path = path
        self._progress = progress
        self._pending: list[str] = []

    def add(self, line: Line) -> None:
        """Write *line* at the end of the file, now."""
        self.lines.append(line)
        self._pending.append(json.dumps(line, default=str))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before_bytes = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{text}\n" for text in self._pending))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._progress(f"{self._path.name} cannot be written ({error}): {self._pending[-1]}")
            with contextlib.suppress(OSError):
                os.truncate(self._path, before_bytes)  # no half line before the next one
            return
        self._pending.clear()

    @property
    def latest(self) -> list[Line]:
        """Of each name the last line."""
        return list({line["name"]: line for line in self.lines}.values())

    @property
    def done(self) -> frozenset[str]:
        """Names of what has its figures."""
        return frozenset(line["name"] for line in self.latest if is_done(line))


def is_done(line: Line) -> bool:
    """Say whether *line* need not be measured again: it is right, or did not fit as expected."""
    if line["status"] == OUT_OF_MEMORY:
        return bool(line.get("was_expected_to_run_out"))
    return line["status"] == OK and line["figures"].get("is_right") is not False


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of an earlier day. A torn last line is left out."""
    found: list[Line] = []
    for text in (folder / FIGURES).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def run_parts(
    names: Iterable[str],
    request: Request,
    journal: Journal,
    deadline: Deadline,
    progress: Progress,
) -> bool:
    """Run parts one after another; return whether the time was enough for all."""
    is_enough = True
    for name in names:
        part = PARTS[name]
        left_s = deadline.left_s()
        progress(f"part {name} ({part.seconds} s expected): {part.summary}")
        if left_s < LEAST_S:
            journal.add({"name": name, "status": NOT_REACHED, "reason": "the time was used up"})
            is_enough = False
            continue
        limit_s = min(SMOKE_LIMIT_S if request.is_smoke else part.limit_s, left_s)
        asked = dataclasses.replace(request, part=name, limit_s=limit_s)
        is_enough &= run_part(asked, journal, progress)
    return is_enough


def run_part(request: Request, journal: Journal, progress: Progress) -> bool:
    """Run one part; return whether it ended in time.

    A process that dies costs the task that it was at; a new one goes on with the rest.
    """
    deadline = Deadline.after(request.limit_s)
    given_up = set(journal.done)
    while True:
        asked = dataclasses.replace(
            request, done=frozenset(given_up), limit_s=max(1.0, deadline.left_s())
        )
        num_before, at_task = len(given_up), ""
        with Child(SERVE, asked) as child:
            while True:
                wait_s = deadline.left_s()
                if not at_task and num_before == len(given_up):
                    wait_s = min(wait_s, BEGIN_S)
                kind, message = child.receive(wait_s)
                if isinstance(message, Failure) or kind == "end":
                    break
                if kind == "begin":
                    at_task = message
                    given_up.add(at_task)
                    continue
                at_task = ""
                journal.add(message)
                progress(describe(message))
        if kind == "end":
            return True
        is_late = message.status == TIMED_OUT
        if at_task or is_late or num_before == len(given_up):
            line = {"name": at_task or request.part, "status": message.status}
            journal.add(line | {"reason": message.reason})
            progress(describe(journal.lines[-1]))
        if is_late or num_before == len(given_up):
            return not is_late


def describe(line: Mapping[str, Any]) -> str:
    """Return *line* in short, for whoever watches."""
    if line["status"] != OK:
        return f"  {line['name']}: {line['status']}: {line.get('reason', '')}"
    figures = line["figures"]
    said = []
    if figures.get("step_ms") is not None:
        said.append(f"{figures['step_ms']:.1f} ms")
    if figures.get("allocated_bytes") is not None:
        said.append(f"{figures['allocated_bytes'] / 1e9:.2f} GB")
    said += [f"{key} {figures[key]}" for key in ("outcome", "is_right") if key in figures]
    return f"  {line['name']}: {', '.join(said) or 'measured'}, {line.get('wall_s', 0)} s"


def problems_of(lines: Iterable[Line]) -> list[str]:
    """Return what must not be: failures, crashes, other bits, a size that was to run out and fits
    not."""
    found = []
    for line in lines:
        if line["status"] in (FAILED, CRASHED, TIMED_OUT):
            found.append(f"{line['name']}: {line['status']}: {line.get('reason', '')}")
        elif line["status"] == OUT_OF_MEMORY and not line.get("was_expected_to_run_out"):
            found.append(f"{line['name']}: out of memory, and was to fit")
        elif line.get("figures", {}).get("is_right") is False:
            found.append(f"{line['name']}: wrong: {line['figures']}")
    return found


def unpack_wheels(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels in *folder*, of packages that are Python alone; return their file names."""
    names = []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        names.append(wheel.name)
    return names
