"""What the catalogue says about one key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Cause and remedy of the errors and warnings that have one key."""

    key: str
    """What their messages end with, without brackets; it never changes."""
    cause: str
    """What happened, and what led to it: whole sentences."""
    remedy: str
    """What a user does about it: whole sentences."""


@dataclass(frozen=True)
class Chapter:
    """The entries of one part of hf_pyao."""

    title: str
    entries: tuple[Entry, ...]
