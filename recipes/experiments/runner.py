"""What the experiments' scripts share: their command line, and what they leave behind."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.rows import MINIATURE, PREDICT, REAL, Result, result_path, write_rows
from experiments.systems import MODELS
from hf_pyao.errors import ConfigError, PyAOError

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
Plot = Callable[[dict[str, Any]], Any]
"""Makes a matplotlib figure of a result file."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of a paper's figures or tables."""

    name: str
    """Of its script and its files."""
    title: str
    predict: Mode
    miniature: Mode
    real: Mode
    section: Callable[[Callable[[str], dict[str, Any] | None]], str]
    """Writes its part of the page, from what ``read(mode)`` returns."""
    plot: Plot | None = None


def run_experiment(experiment: Experiment, argv: Sequence[str] | None = None) -> None:
    """Run the script of *experiment*; bad settings end it with one line and exit status 2."""
    args = _parse(experiment, argv)
    try:
        _run(experiment, args)
    except PyAOError as error:
        print(f"{experiment.name}.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(experiment: Experiment, args: argparse.Namespace) -> None:
    mode = args.mode or PREDICT
    options = Options(
        models=tuple(args.models), is_smoke=args.smoke, sweeps=tuple(args.sweeps or ())
    )
    modes = {PREDICT: experiment.predict, MINIATURE: experiment.miniature, REAL: experiment.real}
    result = modes[mode](options)
    for row in result.rows:
        print(("smoke, a micro model for " if args.smoke else "") + _line(row))
    path = args.result
    if path is None and not args.smoke:
        path = result_path(experiment.name, mode)
    if path is None:
        return
    write_rows(path, experiment.name, mode, result)
    if experiment.plot is not None and args.plots:
        _draw(experiment.plot, path)


def _draw(plot: Plot, path: Path) -> None:
    from experiments.rows import read_document
    from hf_pyao.tools.report.plots.look import image_bytes, need_matplotlib

    need_matplotlib()
    figure = plot(read_document(path))
    if figure is None:
        return
    image = path.with_suffix(".png")
    image.write_bytes(image_bytes(figure, "png"))
    print(f"written to {image}")


def _line(row: Any) -> str:
    size = "" if row.micro_batch is None else f" at {row.micro_batch}"
    value = row.status if row.value is None else f"{row.value:.6g} {row.unit}"
    paper = "" if row.published is None else f" (published: {row.published:g})"
    head = f"{row.figure} | {row.model} | {row.system}{size} | {row.quantity}"
    return f"{head}: {value}{paper} [{row.mode}]"


def _parse(experiment: Experiment, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{experiment.name}.py",
        description=f"{experiment.title}. What came of it is in README.md beside this script.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            f"  python recipes/experiments/{experiment.name}.py --predict\n"
            f"  python recipes/experiments/{experiment.name}.py --predict --models opt\n"
            f"  python recipes/experiments/{experiment.name}.py --smoke"
        ),
    )
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        (PREDICT, "the predictor and the communication model, for the paper's hardware (default)"),
        (MINIATURE, "small models on this machine's CPU, or a local cluster's result files"),
        (REAL, "the hardware as it is found: needs an accelerator"),
    ):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    parser.add_argument(
        "--smoke", action="store_true", help="small models and few points, in seconds: does it run?"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="only these models"
    )
    parser.add_argument(
        "--sweeps",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what recipes/local_cluster.py --result wrote, where a miniature is of a cluster",
    )
    parser.add_argument(
        "--result", type=Path, help="result file (default: in recipes/results/experiments)"
    )
    parser.add_argument(
        "--no-plots", dest="plots", action="store_false", help="write no plot beside it"
    )
    return parser.parse_args(argv)


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


@dataclass(frozen=True)
class NotBuilt:
    """A mode that a figure does not have: it refuses."""

    mode: str
    why: str
    """In a few words; the page has them, too."""

    def __call__(self, options: Options) -> Result:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"there is no --{self.mode} for this one: {self.why}.")
