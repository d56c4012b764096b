"""Errors that hf_pyao raises; each says what came, what was expected, where, and the remedy.

Every error and every warning has a key: a short name that does not change when its text does. The
key is printed at the end of the message, as ``[pyao:unknown-name]``. TROUBLESHOOTING.md has cause
and remedy for each key. A key stands for what a user can do, and not for a line of code: all values
out of their range share ``setting-value``; two causes of one symptom have two keys if their
remedies differ. In an f-string an error is its message without the key, since it becomes a part of
another message.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from hf_pyao.text import echo


def mark(key: str) -> str:
    """Return *key* as messages show it."""
    return f"[pyao:{key}]"


class PyAOError(Exception):
    """Base class of every error that hf_pyao raises on purpose.

    ``str(error)`` is the message with the key at its end. In an f-string, where the error becomes a
    part of another sentence, it is the message alone.

    Args:
        message: what came, what was expected, where, and what to do.
        key: of TROUBLESHOOTING.md; a class whose errors all have one cause has it as an attribute.
    """

    key: str = ""

    def __init__(self, message: str = "", *, key: str = "") -> None:
        super().__init__(message)
        if key:
            self.key = key

    @property
    def message(self) -> str:
        """What happened, without the key."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        if not self.key:
            return self.message
        gap = "\n" if "\n" in self.message else " "  # what ends in code can be copied without it
        return f"{self.message}{gap}{mark(self.key)}"

    def __format__(self, spec: str) -> str:
        return format(self.message, spec)


class ConfigError(PyAOError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ConflictError(PyAOError, RuntimeError):
    """Something else already moves or recomputes activations, or the setup cannot be supported."""


class NoLayersFoundError(PyAOError, LookupError):
    """No decoder layer was found in the model."""

    key = "no-layers-found"


class SavedTensorModifiedError(PyAOError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""


class ReleasedTensorError(PyAOError, RuntimeError):
    """Backward asked for a saved tensor whose buffers have already been given back."""

    key = "buffers-given-back"


class RecomputationError(PyAOError, RuntimeError):
    """A layer that ran again in backward did not save what it had saved in forward."""


class DiskError(PyAOError, RuntimeError):
    """A file on the disk cannot be written or read, or holds something else than was written."""

    key = "disk"


class InternalError(PyAOError, AssertionError):
    """Something that hf_pyao relies on does not hold: a defect of hf_pyao, not of a script."""

    key = "internal"


def warn(
    logger: logging.Logger,
    key: str,
    message: str,
    *args: object,
    level: int = logging.WARNING,
    exc_info: bool = False,
) -> None:
    """Log *message* with the *key* at its end.

    Args:
        logger: of the module that warns.
        key: of TROUBLESHOOTING.md.
        message: with the places of *args*, as for ``logger.warning``.
        args: an error of ours is shown without its own key.
        level: of :mod:`logging`.
        exc_info: log the traceback of the exception that is being handled, too.
    """
    shown = (f"{each}" if isinstance(each, PyAOError) else each for each in args)
    logger.log(level, f"{message} {mark(key)}", *shown, stacklevel=2, exc_info=exc_info)


_LONGEST_GUESS = 100
"""Longest name for which the nearest known one is looked for: the search takes quadratic time."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to *name*, or an empty string."""
    if len(name) > _LONGEST_GUESS:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """Build the error for an unknown *kind* of name, with the nearest match and all known ones."""
    options = sorted(known)
    hint = nearest(name, options) if isinstance(name, str) else ""
    return ConfigError(
        f"unknown {kind} {echo(name)}{hint or ';'} known: {', '.join(options)}.",
        key="unknown-name",
    )
