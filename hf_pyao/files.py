"""Reading JSON that others may have written, and writing files that others may be reading."""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hf_pyao.errors import PyAOError
from hf_pyao.text import echo


def read_json_object(
    path: str | os.PathLike[str], error: type[PyAOError], *, what: str = "", expected: str
) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file, UTF-8.
        error: what is raised.
        what: what the file should be, for messages.
        expected: what to give instead, for messages: a sentence.

    Raises:
        PyAOError: of the class *error*: the file cannot be read, is no JSON, or no object.
    """
    name = echo(os.fspath(path))
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as cause:  # ValueError: a name that no file can have
        reason = (cause.strerror if isinstance(cause, OSError) else None) or cause
        raise error(
            f"cannot read {what}{what and ' '}{name}: {reason}. {expected}", key="file-unreadable"
        ) from cause
    try:
        values = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as cause:  # no text, or no JSON
        raise error(f"{name} is not valid JSON: {cause}. {expected}", key="file-damaged") from cause
    except RecursionError as cause:
        raise error(
            f"{name} is nested too deep to be read. {expected}", key="file-damaged"
        ) from cause
    if not isinstance(values, dict):
        raise error(
            f"{name} holds a JSON {type(values).__name__}; expected an object. {expected}",
            key="file-damaged",
        )
    return values


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never a part.

    Folders on the way to it are made. A link is replaced, not followed; what is no plain file (a
    pipe, ``/dev/null``) is written to as it is. A new file has the permissions that the umask
    leaves, a replaced one keeps its own.

    Raises:
        OSError: the file cannot be written.
        ValueError: no file can have such a name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    # A name that nobody can foretell, opened only if it is new: no planted link is followed.
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(partial, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with suppress(OSError):
            if not path.is_symlink():
                partial.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
