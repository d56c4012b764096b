"""The measurement of a disk: what it leaves, and what it refuses. No speed is judged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hf_pyao.engine.stores.disk_speed import measure_disk, measure_reads
from hf_pyao.errors import ConfigError, DiskError
from tests.helpers.disks import files_of, take_any_file_system


@pytest.fixture(autouse=True)
def _any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_file_system(monkeypatch)


def test_both_ways_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, nbytes=2**20)
    assert speed.nbytes == 8 * 2**20, "whole requests"
    assert speed.read_gib_per_s > 0
    assert speed.write_gib_per_s > 0
    assert files_of(tmp_path) == []


def test_reads_of_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(20 * 2**20))
    offsets: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    assert measure_reads(path) > 0
    assert sorted(offsets) == [0, 8 * 2**20], "whole requests"
    offsets.clear()
    assert measure_reads(path, 8 * 2**20) > 0
    assert offsets == [0]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="No space"):
        measure_disk(tmp_path, nbytes=2**20)
    assert files_of(tmp_path) == []


def test_a_file_is_refused_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk"):
        measure_disk(tmp_path / "file", "--disk")
