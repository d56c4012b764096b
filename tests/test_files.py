"""Files that are written while others may be reading, or planting links."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.files import read_json_object, replace_file

posix = pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX's")


def test_a_file_is_replaced_whole_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_no_planted_link_is_followed(tmp_path: Path) -> None:
    """In a folder that others write to, a name that could be foretold would be theirs."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "x.json.part").symlink_to(victim)
    (tmp_path / "x.json").symlink_to(victim)
    replace_file(tmp_path / "x.json", b"report")
    assert victim.read_text() == "precious"
    assert (tmp_path / "x.json").read_bytes() == b"report"
    assert not (tmp_path / "x.json").is_symlink()


@posix
def test_permissions_are_those_of_the_umask_or_of_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    before = os.umask(0o027)
    try:
        replace_file(path, b"one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        replace_file(path, b"two")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@posix
def test_what_is_no_plain_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    replace_file(link, b"gone")
    assert link.is_symlink()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"x")


def test_a_failure_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    replace_file(path, b"old")

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "none.json", "."])
def test_what_cannot_be_read_is_an_error_of_the_class_asked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^cannot read .*\. Give another\. \[pyao:file-unreadable\]$"
    ):
        read_json_object(tmp_path / name, ConfigError, expected="Give another.")
