"""Settings that hold paths of files and folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from hf_pyao.errors import ConfigError
from hf_pyao.settings.kind import Kind
from hf_pyao.text import echo


class _Path(Kind):
    """A path, or None; kept as a string. The disk is not looked at."""

    what: ClassVar[str]
    """What it is the path of."""

    def check(self, label: str, value: Any) -> str | None:
        """Check that *value* could be such a path."""
        if value is None:
            return None
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str):
            raise ConfigError(f"{label} is {echo(value)}; {self.expected}.", key="setting-value")
        if "\0" in path:
            raise ConfigError(
                f"{label} is {echo(path)}; {self.expected}, without the character NUL.",
                key="setting-value",
            )
        return path

    @property
    def expected(self) -> str:
        """What a message says was expected."""
        return f"expected the path of a {self.what}, or None"


class FilePath(_Path):
    """Where to write a file, or None; kept as a string. The disk is not looked at."""

    metavar = "FILE"
    what = "file"

    def check(self, label: str, value: Any) -> str | None:
        """Check that *value* could be a file's path."""
        path = super().check(label, value)
        if path is None:
            return None
        if Path(path).name in ("", "..") or path.endswith(("/", os.sep)):
            raise ConfigError(
                f"{label} is {echo(path)}, which names no file; {self.expected}.",
                key="setting-value",
            )
        return path


class FolderPath(_Path):
    """A directory, or None; kept as a string. The disk is not looked at."""

    metavar = "DIRECTORY"
    what = "directory"

    def check(self, label: str, value: Any) -> str | None:
        """Check that *value* could be a directory's path."""
        path = super().check(label, value)
        if path is not None and not path.strip():
            raise ConfigError(f"{label} is {echo(path)}; {self.expected}.", key="setting-value")
        return path
