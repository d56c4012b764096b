"""Runs a user's training script in this process, as ``python`` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_pyao.errors import ConfigError
from hf_pyao.text import echo


def check_script(script: str, *, is_module: bool) -> None:
    """Refuse a script that is not there; *is_module*: it is the name of a module.

    Raises:
        ConfigError: there is no such file.
    """
    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"there is no script {echo(script)}. Give a Python file, or -m MODULE.",
            key="file-unreadable",
        )


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run *script* with its own *arguments*; *is_module*: it is the name of a module.

    Raises:
        BaseException: what the script raises, ``SystemExit`` included.
    """
    before, sys.argv = sys.argv, [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
