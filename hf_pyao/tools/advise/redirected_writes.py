"""Keeps a script's writes out of its folders: they go to a temporary folder, which is deleted.

Redirected are Python's own ways to write (``open``, ``os.mkdir``, ``pathlib``) below the protected
folders, and the output folder of ``transformers.TrainingArguments``. What a script removes or moves
away there stays. ``torch.save`` and the
functions of safetensors that write files do nothing: they write from compiled code. What other
compiled code writes is not seen.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_WRITING = frozenset("wax+")
_SAVERS = (
    ("torch", "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.numpy", "serialize_file"),
)
"""Module and function of what writes files from compiled code."""


@contextmanager
def redirected_writes(protected: Iterable[Path]) -> Iterator[Path]:
    """Redirect writes below *protected* for the whole process, until it ends.

    Yields:
        The temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="pyao-advise-") as folder, ExitStack() as stack:
        overlay = _Overlay(Path(folder), [os.path.abspath(each) for each in protected])
        for module, name, make in (
            (builtins, "open", overlay.opener),
            (io, "open", overlay.opener),
            (os, "mkdir", overlay.maker),
            *((os, name, overlay.remover) for name in ("remove", "unlink", "rmdir")),
            (shutil, "rmtree", overlay.remover),
            *((os, name, overlay.mover) for name in ("rename", "replace")),
        ):
            instead = make(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, instead))
        for module_name, name in _SAVERS:
            stack.enter_context(_nothing_saved(module_name, name))
        stack.enter_context(_output_of_trainers(Path(folder) / "output"))
        yield Path(folder)


class _Overlay:
    """A folder that has the files that are written below others."""

    def __init__(self, folder: Path, protected: list[str]) -> None:
        self._folder = folder
        self._protected = protected

    def opener(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def redirected_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            other = self._instead_of(file)
            if other is None:
                return own(file, mode, *args, **kwargs)
            if _WRITING & set(mode):
                other.parent.mkdir(parents=True, exist_ok=True)
                if not {"w", "x"} & set(mode) and not other.exists() and os.path.exists(file):
                    with own(file, "rb") as source, own(other, "wb") as target:
                        target.write(source.read())
            elif not other.exists():
                other = file
            return own(other, mode, *args, **kwargs)

        return redirected_open

    def maker(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def redirected_mkdir(path: Any, mode: int = 0o777, *args: Any, **kwargs: Any) -> None:
            other = self._instead_of(path)
            if other is None:
                own(path, mode, *args, **kwargs)
            elif os.path.exists(path):
                raise FileExistsError(17, "File exists", os.fspath(path))
            elif not other.exists():
                os.makedirs(other)

        return redirected_mkdir

    def remover(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def redirected_remove(path: Any, *args: Any, **kwargs: Any) -> None:
            other = self._instead_of(path) if kwargs.get("dir_fd") is None else None
            if other is None:
                own(path, *args, **kwargs)
            elif other.exists():
                own(other, *args, **kwargs)

        return redirected_remove

    def mover(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def redirected_move(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            moved, to = self._instead_of(source), self._instead_of(target)
            if moved is None and to is None:
                own(source, target, *args, **kwargs)
            elif moved is None or moved.exists():
                if to is not None:
                    to.parent.mkdir(parents=True, exist_ok=True)
                own(moved or source, to or target, *args, **kwargs)

        return redirected_move

    def _instead_of(self, path: Any) -> Path | None:
        """Return where a path below the protected folders is redirected; None for all others."""
        if isinstance(path, int):
            return None  # a descriptor
        try:
            found = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        if _is_below(found, str(self._folder)) or "__pycache__" in found:
            return None
        if not any(_is_below(found, each) for each in self._protected):
            return None
        return self._folder / "overlay" / found.lstrip(os.sep).replace(":", "")


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


@contextmanager
def _nothing_saved(module_name: str, name: str) -> Iterator[None]:
    try:
        module = __import__(module_name, fromlist=[name])
    except ImportError:
        yield
        return
    with mock.patch.object(module, name, return_value=None):
        yield


@contextmanager
def _output_of_trainers(folder: Path) -> Iterator[None]:
    """Give ``TrainingArguments`` a temporary output folder, without trackers and uploads."""
    from transformers import TrainingArguments

    prepare: Any = TrainingArguments.__post_init__

    def redirected(self: Any, *args: Any, **kwargs: Any) -> None:
        self.output_dir = str(folder)
        if getattr(self, "logging_dir", None) is not None:
            self.logging_dir = str(folder / "logs")
        self.report_to = "none"
        self.push_to_hub = False
        prepare(self, *args, **kwargs)

    with mock.patch.object(TrainingArguments, "__post_init__", redirected):
        yield
