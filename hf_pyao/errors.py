"""Errors that hf_pyao raises; each says what came, what was expected, where, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_pyao.text import echo


class PyAOError(Exception):
    """Base class of every error that hf_pyao raises on purpose."""


class ConfigError(PyAOError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ConflictError(PyAOError, RuntimeError):
    """Something else already moves or recomputes activations, or the setup cannot be supported."""


class NoLayersFoundError(PyAOError, LookupError):
    """No decoder layer was found in the model."""


class SavedTensorModifiedError(PyAOError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""


class ReleasedTensorError(PyAOError, RuntimeError):
    """Backward asked for a saved tensor whose buffers have already been given back."""


class RecomputationError(PyAOError, RuntimeError):
    """A layer that ran again in backward did not save what it had saved in forward."""


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
    return ConfigError(f"unknown {kind} {echo(name)}{hint or ';'} known: {', '.join(options)}.")
