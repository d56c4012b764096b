"""Estimates all ways to train a model, in two processes where there are two cores."""

from __future__ import annotations

import gc
import importlib.util
import logging
import multiprocessing
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pyao.auto.recording.held_interrupts import HeldInterrupts
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.estimate import EstimateRow
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.predictor.way import Way
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.fake_step import runs_without_values
from hf_pyao.tools.estimate.ways import ALL_WAYS, LONG_CONTEXT, METHODS, STREAMED, chunked
from hf_pyao.tools.few_collections import COLLECTION_THRESHOLDS, few_collections, importing

POLL_SECONDS = 1.0
"""How often what processes have done is looked up."""


@dataclass(frozen=True)
class Job:
    """Ways that share recorded steps, so that one process does them."""

    ways: tuple[Way, ...]
    config: Any
    """The model's transformers configuration."""
    hardware: Hardware
    options: Mapping[str, Any]
    """Keyword arguments of :class:`~hf_pyao.tools.estimate.estimate.Estimator`."""
    micro_batch: int | None
    with_longest: bool

    def run(self, on_done: Callable[[str], None]) -> tuple[list[EstimateRow], int]:
        """Return the rows, and how many steps were recorded.

        A way whose head the chunked loss does not understand has none.

        Args:
            on_done: told the name of each way that is done.

        Raises:
            ConfigError: the model cannot be run on fake tensors.
        """
        estimator = Estimator(self.config, self.hardware, **self.options)
        rows = []
        for way in self.ways:
            try:
                with runs_without_values(self.config.model_type):
                    row = estimator.row(
                        way, micro_batch=self.micro_batch, with_longest=self.with_longest
                    )
            except ConfigError as error:
                if way.levers is None or error.key == "model-not-run":
                    raise
                on_done(way.name)
                continue
            rows.append(row)
            on_done(row.method)
        return rows, estimator.num_recordings

    def import_packages(self) -> None:
        """Import what each process would import: the model's code and adapters."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.config), None)
        if self.options.get("lora_rank") is not None and importlib.util.find_spec("peft"):
            importlib.import_module("peft")

    def run_noting(self, notes: Path) -> tuple[list[EstimateRow], int]:
        """Return what :meth:`run` does, and add the name of each way that is done to *notes*."""

        def note(name: str) -> None:
            with notes.open("a", encoding="utf-8") as file:
                file.write(name + "\n")

        return self.run(note)


def all_jobs(**shared: Any) -> list[Job]:
    """Return the jobs of all ways, the longest first; *shared* are the other fields of each."""
    recorded_alike = [way for way in ALL_WAYS if not way.checkpointing]
    if shared["options"].get("lora_rank") is not None:  # else all weights are trained
        recorded_alike.append(STREAMED)
    checkpointing = [way for way in ALL_WAYS if way.checkpointing]
    return [
        Job(tuple(map(chunked, recorded_alike)), **shared),
        Job((LONG_CONTEXT,), **shared),
        Job((*checkpointing, *map(chunked, checkpointing)), **shared),
        Job(tuple(recorded_alike), **shared),
    ]


def run_jobs(
    jobs: Sequence[Job], num_processes: int, on_done: Callable[[str], None]
) -> tuple[list[EstimateRow], int]:
    """Run *jobs*; return their rows, in the order of ways, and how many steps were recorded.

    Args:
        jobs: what is estimated.
        num_processes: 1: this one.
        on_done: told the name of each way that is done.

    Raises:
        ConfigError: a job did.
    """
    with few_collections():
        if num_processes == 1:
            done = [job.run(on_done) for job in jobs]
        else:
            done = _run_in_processes(jobs, num_processes, on_done)
    rows = [row for rows, _ in done for row in rows]
    names = list(METHODS)
    rows.sort(key=lambda row: names.index(row.method))
    return rows, sum(count for _, count in done)


def _run_in_processes(
    jobs: Sequence[Job], num_processes: int, on_done: Callable[[str], None]
) -> list[tuple[list[EstimateRow], int]]:
    """Run each of *jobs* in one of several processes; a file tells what they have done."""
    method = _start_method()
    if method == "fork":
        with importing():
            jobs[0].import_packages()
    context = multiprocessing.get_context(method)
    others = multiprocessing.active_children()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_processes, context, _begin) as pool,
    ):
        notes, num_told = Path(folder) / "done.txt", 0
        notes.touch()
        done: list[tuple[list[EstimateRow], int]] = []
        try:
            with HeldInterrupts():  # Python ignores what is raised in its hooks around a fork
                running = {pool.submit(job.run_noting, notes) for job in jobs}
            while running:
                ended, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
                done += [future.result() for future in ended]
                names = notes.read_text(encoding="utf-8").splitlines()
                for name in names[num_told:]:
                    on_done(name)
                num_told = len(names)
        except BaseException:  # the end of the block would wait for what still runs
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise
    return done


def _start_method() -> str:
    """Return how processes are started: a fork need not import torch and transformers again.

    A process that has threads of its own, or a GPU, cannot be forked safely. tqdm's monitor is no
    reason: what is forked draws no bars.
    """
    import torch

    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and type(thread).__name__ != "TMonitor"
    ]
    is_alone = not others and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "fork" if sys.platform == "linux" and is_alone else "spawn"


def _begin() -> None:
    """Keep a process quiet, and on one core; have the collector pass over what is imported.

    Ctrl-C on a terminal goes to all processes: the one that waits for these ends them.
    """
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
