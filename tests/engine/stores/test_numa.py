"""Reserving memory near the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_pyao.engine.stores.numa import cores_of_node, node_of_pci_device, running_near


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    lone = tmp_path / "bus/pci/devices/0000:01:00.0"
    lone.mkdir(parents=True)
    (lone / "numa_node").write_text("-1\n")
    first = min(os.sched_getaffinity(0))
    for node, cores in ((0, "1-3,5"), (1, str(first)), (2, "900-901")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_node_is_read_and_absence_is_none(sysfs: Path) -> None:
    assert node_of_pci_device("0000:3B:00.0", sysfs) == 1
    assert node_of_pci_device("0000:01:00.0", sysfs) is None
    assert node_of_pci_device("0000:ff:00.0", sysfs) is None


def test_core_lists_are_ranges_and_numbers(sysfs: Path) -> None:
    assert cores_of_node(0, sysfs) == {1, 2, 3, 5}
    assert cores_of_node(7, sysfs) == frozenset()


def test_runs_near_the_node_and_returns(sysfs: Path) -> None:
    before = os.sched_getaffinity(0)
    with running_near(1, sysfs):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("node", [None, 2, 7])
def test_does_nothing_without_cores_there(sysfs: Path, node: int | None) -> None:
    before = os.sched_getaffinity(0)
    with running_near(node, sysfs):
        assert os.sched_getaffinity(0) == before
