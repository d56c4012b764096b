"""Runs one of the papers' figures or tables.

    python recipes/experiments/run.py figure4 --predict
    python recipes/experiments/run.py figure4 --predict --models opt
    python recipes/experiments/run.py figure4 --smoke

What came of each is in README.md beside this script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import Experiment, Options
from experiments.plots import Plot
from experiments.rows import MINIATURE, PREDICT, REAL, read_document, result_path, write_rows
from experiments.systems import MODELS
from hf_pyao.errors import ConfigError, PyAOError

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; bad settings end it with one line and exit status 2."""
    args = _parse(argv)
    try:
        _run(BY_NAME[args.experiment], args)
    except PyAOError as error:
        print(f"{args.experiment}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(experiment: Experiment, args: argparse.Namespace) -> None:
    mode = args.mode or PREDICT
    options = Options(
        models=tuple(args.models), is_smoke=args.smoke, sweeps=tuple(args.sweeps or ())
    )
    run = experiment.modes[mode]
    if isinstance(run, str):
        raise ConfigError(f"there is no --{mode} for this one: {run}.")
    if mode == PREDICT:
        torch.set_num_threads(1)  # fake tensors need no more
    result = run(options)
    for row in result.rows:
        print(("smoke, a micro model for " if args.smoke else "") + f"{_line(row)} [{mode}]")
    path = args.result
    if path is None and not args.smoke:
        path = result_path(experiment.name, mode)
    if path is None:
        return
    write_rows(path, experiment.name, mode, result)
    if mode in experiment.plots and args.plots:
        _draw(experiment.plots[mode], path)


def _draw(plot: Plot | Callable[[dict[str, Any]], Any], path: Path) -> None:
    from hf_pyao.tools.report.plots.look import image_bytes, need_matplotlib

    need_matplotlib()
    document = read_document(path)
    figure = plot.draw(document) if isinstance(plot, Plot) else plot(document)
    image = path.with_suffix(".png")
    image.write_bytes(image_bytes(figure, "png"))
    print(f"written to {image}")


def _line(row: Any) -> str:
    size = "" if row.micro_batch is None else f" at {row.micro_batch}"
    value = row.status if row.value is None else f"{row.value:.6g} {row.unit}"
    paper = "" if row.published is None else f" (published: {row.published:g})"
    return f"{row.model} | {row.system}{size} | {row.quantity}: {value}{paper}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="experiments:\n"
        + "\n".join(f"  {name:26}{each.title}" for name, each in BY_NAME.items()),
    )
    parser.add_argument("experiment", choices=BY_NAME, metavar="EXPERIMENT", help="see below")
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        (PREDICT, "the predictor and the communication model, for the paper's hardware (default)"),
        (MINIATURE, "small models on this machine's CPU, or a local cluster's result files"),
        (REAL, "names the command that measures it on an accelerator"),
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


if __name__ == "__main__":
    main()
