"""Forbids this process to write, by the Linux kernel: it holds for compiled code and children too.

Landlock denies to create, open for writing, truncate, rename, link and remove files outside of
given folders. It does not govern modes, owners, times and extended attributes: a seccomp filter
makes the calls that change them do nothing, and return as if they had.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.text import describe_error

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls (``linux/landlock.h``), on all architectures."""

WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Rights of the first version: to write to, create and remove files and folders of any kind."""

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
"""Operations of ``prctl``, and the mode of seccomp."""

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOWED, DONE_NOTHING = 0x7FFF0000, 0x00050000
"""Instructions of the filter, which looks at the architecture (at byte 4 of its input) and at the
number of the call (at byte 0), and its answers: the latter returns 0 without the call."""

CALLS = {
    "x86_64": (
        0xC000003E,
        # truncate; chmod and chown; utime; setxattr and removexattr
        *(76, 90, 91, 92, 93, 94, 260, 268, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199),
    ),
    "aarch64": (0xC00000B7, 45, 52, 53, 54, 55, 88, 5, 6, 7, 14, 15, 16),
}
"""``platform.machine()`` -> its number in a filter, and those of the calls."""

NEWER_CALLS = (452, 463, 466, 469)
"""fchmodat2, setxattrat, removexattrat and file_setattr have one number everywhere."""


def forbid_writes(writable: Iterable[Path]) -> None:
    """Forbid this thread, and all that it starts, to write outside of *writable*, for good.

    Raises:
        ConfigError: the system cannot forbid it.
    """
    machine = platform.machine()
    try:
        if sys.platform != "linux" or machine not in CALLS:
            raise OSError(f"{sys.platform} on {machine}")
        libc = ctypes.CDLL(None, use_errno=True)
        version = _call(libc.syscall, CREATE_RULESET, None, 0, 1)
        rights = WRITES | (REFER if version > 1 else 0) | (TRUNCATE if version > 2 else 0)
        rules = _call(libc.syscall, CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
        for path in writable:
            found = os.open(path, os.O_PATH)
            allowed = rights if path.is_dir() else rights & (WRITE_FILE | TRUNCATE)
            _call(libc.syscall, ADD_RULE, rules, 1, struct.pack("=Qi", allowed, found), 0)
            os.close(found)
        _call(libc.prctl, NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call(libc.syscall, RESTRICT_SELF, rules, 0)
        os.close(rules)
        architecture, *calls = (*CALLS[machine], *NEWER_CALLS)
        steps = [
            (LOAD, 0, 0, 4),
            (JUMP_IF_EQUAL, 0, len(calls) + 1, architecture),
            (LOAD, 0, 0, 0),
            *((JUMP_IF_EQUAL, len(calls) - i, 0, number) for i, number in enumerate(calls)),
            (RETURN, 0, 0, ALLOWED),
            (RETURN, 0, 0, DONE_NOTHING),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in steps))
        program = struct.pack("@HP", len(steps), ctypes.addressof(code))
        _call(libc.prctl, SET_SECCOMP, FILTER, program)
    except OSError as error:
        raise ConfigError(
            f"this system cannot forbid a script to write ({describe_error(error)}), which takes "
            "Landlock (Linux 5.13 or later, on x86-64 or ARM64). Run a script that may write with "
            "--unprotected: what its Python code writes then still goes to a temporary folder.",
            key="writes-not-forbidden",
        ) from error


def _call(function: Any, *arguments: int | bytes | None) -> int:
    """Call a function of the C library, whose numbers are as wide as pointers.

    Raises:
        OSError: it failed.
    """
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = function(*words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
