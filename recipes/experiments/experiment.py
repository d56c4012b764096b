"""What an experiment is: a figure or table of a paper, and its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.page import source
from experiments.rows import MINIATURE, PREDICT, REAL, Result
from hf_pyao.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an experiment is asked for."""

    models: Sequence[str]
    """Keys of ``systems.MODELS``."""
    is_smoke: bool
    """A model that runs in seconds, and few points."""
    sweeps: Sequence[Path] = ()
    """Result files of ``recipes/local_cluster.py``."""


Mode = Callable[[Options], Result]
Part = Callable[[dict[str, Any]], list[str]]
"""Writes what the page says of a result file, block by block."""
Plot = Callable[[dict[str, Any]], Any]
"""Makes a matplotlib figure of a result file."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of a paper's figures or tables."""

    name: str
    """For the command line, and of its files."""
    title: str
    """Heading of its part of the page."""
    predict: Mode
    miniature: Mode | str
    """A text says why there is none; the same in ``real``."""
    real: Mode | str
    parts: Mapping[str, Part]
    """Mode -> what the page says of its result file; in the page's order."""
    introduction: str = ""
    plot: Plot | None = None

    @property
    def modes(self) -> dict[str, Mode | str]:
        """What is run in each mode, or why nothing is."""
        return {PREDICT: self.predict, MINIATURE: self.miniature, REAL: self.real}

    def section(self, read: Callable[[str], dict[str, Any] | None]) -> str:
        """Return its part of the page; *read* returns a mode's result file, None without one."""
        blocks = [f"## {self.title}", self.introduction]
        for mode, part in self.parts.items():
            document = read(mode)
            if document is not None:
                blocks += [*part(document), source(document)]
        return "\n\n".join(filter(None, blocks))


def progress(items: Iterable[Item], what: str) -> Iterable[Item]:
    """Return *items*, with a bar on a terminal while they are gone through."""
    from tqdm import tqdm

    bar: Iterable[Item] = tqdm(list(items), desc=what, leave=False, disable=None)
    return bar


def need_accelerator(what: str) -> None:
    """Refuse to go on without an accelerator.

    Raises:
        ConfigError: torch finds none; says what *what* would need.
    """
    import torch

    if not torch.accelerator.is_available():
        raise ConfigError(f"--real needs {what}, and torch finds no accelerator here.")
