"""Settings with which streamed weights lie on a disk, and reads that fail on purpose."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_pyao.auto.install import weights_on_disk
from hf_pyao.engine.stores import disk_files
from hf_pyao.engine.stores.disk_reader import DiskReader
from hf_pyao.model.map.module_map import find_layers

Fault = Callable[[int, Sequence[memoryview], int, int], int]
"""Gets descriptor, buffers, offset and number of the read; returns the bytes that it has read."""


def on_disk(model: nn.Module, folder: Path, share: float = 0.98, **settings: Any) -> dict[str, Any]:
    """Return settings under which the host has room for *share* of the frozen weights of layers."""
    frozen = [
        parameter.nbytes
        for _, layer in find_layers(model).layers
        for parameter in layer.parameters()
        if not parameter.requires_grad and parameter.dim() > 1
    ]
    settings = {"stream_weights": 0, "min_bytes": 0, "disk_gib": 0, **settings}
    return {**settings, "disk_path": folder, "host_memory_gib": share * sum(frozen) / 2**30}


def files_of(folder: Path) -> list[Path]:
    """Return all files below *folder*."""
    return sorted(each for each in folder.rglob("*") if each.is_file())


def take_any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests run where temporary files are in memory: only that refusal is left out."""
    monkeypatch.setattr(disk_files, "MEMORY_FILE_SYSTEMS", frozenset())


def read_with(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> list[int]:
    """Let readers that are made from now on read by *fault*; return a list of the reads' offsets."""
    offsets: list[int] = []

    def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        return fault(descriptor, buffers, offset, len(offsets) - 1)

    monkeypatch.setattr(weights_on_disk, "DiskReader", lambda: DiskReader(read_into))
    return offsets


def plain(descriptor: int, buffers: Sequence[memoryview], offset: int, number: int) -> int:
    """Read as the system does."""
    return os.preadv(descriptor, list(buffers), offset)


def holds_in_child(check: Callable[[], bool]) -> bool:
    """Say whether *check* is true in the child of a fork, and comes to its end there."""
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=lambda: os._exit(0 if check() else 1))
    child.start()
    child.join(30.0)
    child.kill()
    return child.exitcode == 0
