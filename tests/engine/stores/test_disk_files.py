"""The private folder, parts that are being written, and what killed runs leave."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pyao.engine.stores.disk_files import (
    being_written,
    file_system_of,
    part_of,
    private_folder,
    remove_leftovers,
)
from hf_pyao.errors import ConfigError

WRITER = """
import sys, time
from pathlib import Path
from hf_pyao.engine.stores.disk_files import being_written
with being_written(Path(sys.argv[1])):
    print("writing", flush=True)
    time.sleep(60)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "new" / "disk", "disk_path")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert private_folder(tmp_path / "new" / "disk", "disk_path") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_memory_is_no_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    escaped = str(tmp_path).replace(" ", "\\040")
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:5 / {escaped}/in\\040memory rw shared:1 - tmpfs tmpfs rw\n"
    )
    (tmp_path / "in memory" / "deep").mkdir(parents=True)
    assert file_system_of(tmp_path / "in memory" / "deep", mounts) == "tmpfs"
    assert file_system_of(tmp_path, mounts) == "ext4"
    assert file_system_of(tmp_path, tmp_path / "none") == ""


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="disk_path"):
        private_folder(tmp_path / "file", "disk_path")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(KeyboardInterrupt), being_written(path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_parts_are_private_and_planted_links_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with being_written(path) as descriptor:
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    (tmp_path / "victim").write_text("kept")
    part_of(path).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"), being_written(path):
        pass
    assert remove_leftovers(tmp_path) == 0
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.thorough
def test_leftovers_of_killed_runs_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead, live = start_writer(tmp_path / "dead.bin"), start_writer(tmp_path / "live.bin")
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert part_of(tmp_path / "dead.bin").exists()
        assert remove_leftovers(tmp_path) == 1
        assert not part_of(tmp_path / "dead.bin").exists()
        assert part_of(tmp_path / "live.bin").exists()
        live.send_signal(signal.SIGINT)
        live.wait()
        assert not list(tmp_path.iterdir()), "Ctrl-C leaves nothing"
    finally:
        for each in (dead, live):
            each.kill()
            each.communicate()


def test_who_waited_for_a_part_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """The lock is on the file: after a rename, it is no longer that of the part's name."""
    path = tmp_path / "a.bin"
    with being_written(path) as first:
        os.write(first, b"whole")
        os.replace(part_of(path), path)
        with being_written(path) as second:
            os.write(second, b"other")
        assert path.read_bytes() == b"whole"
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]
