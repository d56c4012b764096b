"""What an experiment is: a figure or table of a paper, and its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from experiments.plots import Plot
from experiments.rows import MINIATURE, PREDICT, REAL, Result

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


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of a paper's figures or tables; ``page.md`` has what the page says of it."""

    name: str
    """For the command line, and of its files."""
    title: str
    """Heading of its part of the page."""
    predict: Mode
    miniature: Mode | str
    """A text says why there is none."""
    real: str
    """What measures it on an accelerator."""
    plots: Mapping[str, Plot | Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    """Mode -> what is drawn of its result file; a function returns the figure."""

    @property
    def modes(self) -> dict[str, Mode | str]:
        """What is run in each mode, or why nothing is."""
        return {PREDICT: self.predict, MINIATURE: self.miniature, REAL: self.real}


def progress(items: Iterable[Item], what: str) -> Iterable[Item]:
    """Return *items*, with a bar on a terminal while they are gone through."""
    from tqdm import tqdm

    bar: Iterable[Item] = tqdm(list(items), desc=what, leave=False, disable=None)
    return bar
