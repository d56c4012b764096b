"""Keeps a script's writes out of its folders.

The kernel forbids them (``forbidden_writes.py``). So that scripts run all the same, what Python's
own functions write (``open``, ``os.mkdir``, ``pathlib``) goes to a temporary folder, which is
deleted, and so does the output of ``transformers.TrainingArguments``. Files that were there before
stay as they are, also where a script changes, removes or moves them. ``torch.save`` and the
functions of safetensors that write files do nothing: they write from compiled code.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hf_pyao.tools.advise.forbidden_writes import forbid_writes

_WRITING = frozenset("wax+")
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGING = (
    *("mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink"),
    *("truncate", "chmod", "chown", "utime"),
)
"""Functions of ``os`` whose paths are redirected; what is not there yet is left as it is."""

_SAVERS = ("torch.save", "safetensors.torch.serialize_file", "safetensors.numpy.serialize_file")
"""What writes files from compiled code."""

_REMOVE = "import os, shutil, sys; os.read(0, 1); shutil.rmtree(sys.argv[1], True)"
"""Waits until it is told to, or until the process that may tell it has ended, whichever way."""

_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"),
)
_CACHES_AT_HOME = (".cache", ".triton", ".nv")
"""Where libraries keep what they download and compile: variables, and folders."""


@contextmanager
def redirected_writes(script: str, *, is_forbidden: bool) -> Iterator[None]:
    """Redirect writes of the whole process, until it ends, but those to caches and devices.

    Args:
        script: a cache that has its folder, or the current one, is no exception.
        is_forbidden: have the kernel forbid all other writes, for good.

    Raises:
        ConfigError: the kernel cannot.
    """
    with ExitStack() as stack:
        patched = stack.enter_context
        name = tempfile.mkdtemp(prefix="pyao-advise-")
        # This process may not remove the folder: what it is forbidden is forbidden for good.
        words = [sys.executable, "-S", "-c", _REMOVE, name]
        remover = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        stack.callback(remover.communicate, b".")
        folder = Path(os.path.realpath(name))
        writable = [folder, *_writable_beside([Path.cwd(), Path(script).parent])]
        if is_forbidden:
            forbid_writes(writable)
        overlay = _Overlay(folder, writable)
        for module in (builtins, io, os):
            patched(mock.patch.object(module, "open", overlay.opener(module.open)))
        for module, function in ((shutil, "rmtree"), *((os, each) for each in _CHANGING)):
            if hasattr(module, function):
                own = getattr(module, function)
                patched(mock.patch.object(module, function, overlay.changer(own)))
        for saver in _SAVERS:
            patched(mock.patch(saver, return_value=None))
        patched(_output_of_trainers(folder / "output"))
        patched(mock.patch.object(tempfile, "tempdir", str(folder)))
        patched(mock.patch.dict(os.environ, TMPDIR=str(folder)))
        yield


def _writable_beside(kept: Sequence[Path]) -> list[Path]:
    """Return caches and devices that are there, but none that one of *kept* is in."""
    paths = [Path(os.path.expanduser("~"), each) for each in _CACHES_AT_HOME]
    paths += [Path(os.environ[each]) for each in _CACHES if os.environ.get(each)]
    paths += [Path("/proc"), *Path("/dev").glob("*")]
    found = [path.resolve() for path in paths]
    inside = {folder for each in kept for folder in (each.resolve(), *each.resolve().parents)}
    return [path for path in found if path.exists() and path not in inside]


class _Overlay:
    """A folder that has the files that are written elsewhere.

    Args:
        folder: has them.
        writable: folders and files that may be written, without symbolic links.
    """

    def __init__(self, folder: Path, writable: Sequence[Path]) -> None:
        self._folder = folder
        self._writable = writable

    def opener(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect ``open``, whose mode is a string, or ``os.open``, whose mode is flags."""

        def redirected_open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            (other,) = self._instead_of([file], kwargs)
            mode = kwargs.pop("flags", mode)
            is_flags = isinstance(mode, int)
            writes = mode & _WRITING_FLAGS if is_flags else _WRITING & set(mode)
            if other is None or not (writes or other.is_file()):
                return own(file, mode, *args, **kwargs)
            other.parent.mkdir(parents=True, exist_ok=True)
            is_new = mode & os.O_TRUNC if is_flags else "w" in mode
            if os.path.isfile(file) and not other.exists() and not is_new:
                shutil.copyfile(file, other)
            return own(other, mode, *args, **kwargs)

        return redirected_open

    def changer(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect a function whose first arguments are paths; what is not there stays as it is."""

        def redirected_change(*args: Any, **kwargs: Any) -> Any:
            others = self._instead_of(args, kwargs)
            if not any(others) or (own.__name__ == "mkdir" and os.path.exists(args[0])):
                return own(*args, **kwargs)
            if own.__name__ == "symlink":
                others[0] = None  # what the link says
            for other in filter(None, others):
                other.parent.mkdir(parents=True, exist_ok=True)
            paths = [other or each for other, each in zip(others, args, strict=True)]
            try:
                return own(*paths, **kwargs)
            except FileExistsError:  # os.makedirs looks for it where it is not
                if own.__name__ != "mkdir":
                    raise
            except FileNotFoundError:
                if not os.path.lexists(args[0]):
                    raise

        return redirected_change

    def _instead_of(self, values: Sequence[Any], options: Mapping[str, Any]) -> list[Path | None]:
        """Return where each path is redirected; None for one that may be written, and for no path.

        With a folder's descriptor in *options*, paths are relative to it, and not redirected.
        """
        others: list[Path | None] = [None] * len(values)
        if any(options[name] is not None for name in options if "dir_fd" in name):
            return others
        for i, value in enumerate(values):
            if isinstance(value, str | bytes | os.PathLike):
                path = Path(os.path.realpath(os.fsdecode(value)))
                if not any(path.is_relative_to(each) for each in self._writable):
                    inside = path.relative_to(path.anchor)
                    others[i] = self._folder / "overlay" / inside
        return others


@contextmanager
def _output_of_trainers(folder: Path) -> Iterator[None]:
    """Give ``TrainingArguments`` a temporary output folder, without trackers and uploads."""
    from transformers import TrainingArguments

    prepare: Any = TrainingArguments.__post_init__

    def redirected(self: Any, *args: Any, **kwargs: Any) -> None:
        self.output_dir = str(folder)
        self.report_to = "none"
        self.push_to_hub = False
        prepare(self, *args, **kwargs)

    with mock.patch.object(TrainingArguments, "__post_init__", redirected):
        yield
