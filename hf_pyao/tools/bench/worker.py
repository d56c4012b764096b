"""What runs in a measuring process: builds the model once, and turns trials into rows."""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hf_pyao import text
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.bench import FAILED, OUT_OF_MEMORY, UNAVAILABLE, BenchRow
from hf_pyao.plan.documents.schema import to_plain
from hf_pyao.plan.hardware.device_speed import measure_device
from hf_pyao.plan.hardware.link_speed import measure_link
from hf_pyao.plan.predictor.largest import largest
from hf_pyao.text import one_line
from hf_pyao.tools.bench.measure import Bench
from hf_pyao.tools.bench.memory import DeviceMemory, device_properties, pick_device
from hf_pyao.tools.bench.methods import MethodUnavailable, find_method
from hf_pyao.tools.bench.models import build_model
from hf_pyao.tools.bench.setup import BenchSetup, Trial
from hf_pyao.tools.packages import MODELS, REMEDY, import_failure

CUBLAS_WORKSPACE = ":4096:8"
"""What cuBLAS needs for deterministic products; read when its handle is made."""


def serve(
    connection: Connection,
    setup: BenchSetup,
    trials: Sequence[Trial],
    kind: type[Bench] = Bench,
) -> None:
    """Measure *trials* in this process by a bench of *kind*, and send each row as it comes.

    Sends ``("ready", {})`` when the model is built, ``("row", fields)`` for each trial, or
    ``("broken", message)`` if there is no model to measure.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    failure = import_failure(MODELS)
    if failure is not None:
        connection.send(("broken", f"no model can be built: {failure}. {REMEDY}"))
        return
    try:
        bench = make_bench(setup, kind)
    except Exception as error:
        traceback.print_exc()
        connection.send(("broken", describe_error(error)))
        return
    connection.send(("ready", {}))
    for trial in trials:
        connection.send(("row", to_plain(run_trial(bench, trial))))


def serve_probe(connection: Connection, device: str, with_speeds: bool) -> None:
    """Send ``("facts", (device, link, speed))``: what the machine has, and how fast that is."""
    try:
        picked = pick_device(device)
        link = dataclasses.asdict(measure_link(picked)) if with_speeds else {}
        speed = dataclasses.asdict(measure_device(picked)) if with_speeds else {}
        facts = describe_device(picked)
        context_bytes = DeviceMemory(picked).context_bytes()  # with kernels loaded by now
        facts["context_gib"] = None if context_bytes is None else round(context_bytes / 2**30, 3)
        connection.send(("facts", (facts, link, speed)))
    except PyAOError as error:
        connection.send(("broken", f"{error}"))


def make_bench(setup: BenchSetup, kind: type[Bench] = Bench) -> Bench:
    """Build the model that *setup* asks for, on its device, within its memory cap.

    Raises:
        ConfigError: the device or the model cannot be had.
    """
    device = pick_device(setup.device)
    DeviceMemory(device).cap(setup.memory_cap_gib)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 deprecates this way, later ones do not
        torch.set_float32_matmul_precision("highest")  # float32 shall mean no TF32
    return kind(build_model(setup, device), setup, device)


def run_trial(bench: Bench, trial: Trial) -> BenchRow:
    """Measure *trial*; what goes wrong is in the row."""
    start = time.perf_counter()
    row = _guarded(
        trial, lambda: _search(bench, trial) if trial.is_search else bench.measure(trial)
    )
    assert row is not None
    bench.clean()
    return dataclasses.replace(row, wall_s=round(time.perf_counter() - start, 3))


def _guarded(trial: Trial, run: Callable[[], BenchRow | None]) -> BenchRow | None:
    """Return what *run* returns, or the row that says why it did not."""
    try:
        return run()
    except MethodUnavailable as error:
        status, reason = UNAVAILABLE, str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            traceback.print_exc()
        status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        reason = describe_error(error)
    # Out here the failed step's frames, which hold its tensors, are gone.
    return BenchRow(
        method=trial.method,
        label=find_method(trial.method).label,
        status=status,
        reason=reason,
        micro_batch=trial.micro_batch,
    )


def _search(bench: Bench, trial: Trial) -> BenchRow:
    """Find the largest micro-batch that fits, and measure at it."""
    tried: dict[int, str] = {}

    def fits(micro_batch: int) -> bool:
        attempt = dataclasses.replace(trial, micro_batch=micro_batch, is_search=False)
        row = _guarded(attempt, lambda: bench.try_steps(attempt))
        bench.clean(keep_pinned=True)
        if row is not None and row.status != OUT_OF_MEMORY:
            raise SearchFailed(row)
        tried[micro_batch] = "" if row is None else row.reason
        return row is None

    try:
        found = largest(fits, trial.micro_batch)
    except SearchFailed as failure:
        return failure.row
    bench.clean()  # what is measured counts its own pinned memory alone
    at_largest = dataclasses.replace(trial, micro_batch=max(1, found), is_search=False)
    row = _guarded(at_largest, lambda: bench.measure(at_largest)) if found else None
    if row is None:
        row = BenchRow(
            method=trial.method,
            label=find_method(trial.method).label,
            status=OUT_OF_MEMORY,
            reason=tried[1],
            micro_batch=0,
        )
    elif row.reason:
        row = dataclasses.replace(row, reason=f"when measured: {row.reason}")
    elif found == trial.micro_batch:
        row = dataclasses.replace(row, reason=f"no larger one than {found} was tried")
    # Each trial of a search has shapes of its own: there is no one step to compare.
    return dataclasses.replace(
        row, num_tried=len(tried), loss=None, gradient_norm=None, gradient_digest=None
    )


class SearchFailed(Exception):
    """A try ended otherwise than by fitting or running out of memory."""

    def __init__(self, row: BenchRow) -> None:
        super().__init__(row.reason)
        self.row = row


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether *error* tells of device or pinned memory that ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def describe_error(error: BaseException) -> str:
    """Return the error in one line; its class too, unless the text says what happened."""
    lines = f"{error}".strip().splitlines()
    if isinstance(error, PyAOError | torch.OutOfMemoryError):
        return one_line(lines[0]) if lines else ""
    return text.describe_error(error)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return name, memory (GiB) and driver of *device*."""
    facts: dict[str, Any] = {"device": str(device), "name": "CPU", "memory_gib": None}
    if device.type == "cpu":
        return facts
    properties = device_properties(device)
    facts["name"] = str(getattr(properties, "name", device.type))
    total_bytes = DeviceMemory(device).total_bytes()
    facts["memory_gib"] = None if total_bytes is None else round(total_bytes / 2**30, 2)
    if device.type == "cuda":
        facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["driver"] = _driver()
        facts["pci_bus"] = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
        facts["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return facts


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="ascii").splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    numbers = [word for word in first.split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else None
