"""Measuring processes that do not measure: each fails in its own way at a method of that name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hf_pyao.plan.documents.bench import BenchRow
from hf_pyao.plan.documents.schema import to_plain
from hf_pyao.tools.bench.peers import Installed
from hf_pyao.tools.bench.setup import BenchSetup, Trial


def misbehave(connection: Connection, setup: BenchSetup, trials: Sequence[Trial]) -> None:
    """Send a row for each trial; hang at ``pyao-layer``, die at ``checkpoint`` and others."""
    sys.stdout.write("starting\na segmentation fault\n")
    sys.stdout.flush()
    connection.send(("ready", {}))
    for trial in trials:
        if trial.method == "pyao-layer":
            time.sleep(600)
        if trial.method == "checkpoint":
            os.kill(os.getpid(), signal.SIGKILL)
        if trial.method == "save-on-cpu":
            sys.exit(7)
        row = BenchRow(method=trial.method, label=str(os.getpid()), micro_batch=trial.micro_batch)
        connection.send(("row", to_plain(row)))


@contextmanager
def halved_saved_tensors(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Install a method with wrong gradients, which ``module:function`` names."""

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / 2 if tensor.is_floating_point() else tensor

    yield Installed(step=lambda: saved_tensors_hooks(halved, lambda tensor: tensor))


def break_down(connection: Connection, setup: BenchSetup, trials: Sequence[Trial]) -> None:
    """Say that there is nothing to measure."""
    connection.send(("broken", "no such model"))


def die_early(connection: Connection, setup: BenchSetup, trials: Sequence[Trial]) -> None:
    """End before the model is built."""
    sys.exit(3)
