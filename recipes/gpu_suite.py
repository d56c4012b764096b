"""Everything that wants a GPU, the most valuable first, on a machine that is lent for minutes.

Needs torch, transformers and accelerate alone (pytest for the tests, matplotlib for the plots), and
runs from a checkout without installation. Results are written as they come; what a run does not
reach, the next one does::

    python recipes/gpu_suite.py --list
    python recipes/gpu_suite.py --time-budget 570
    python recipes/gpu_suite.py --time-budget 570 --resume
    python recipes/gpu_suite.py --smoke        # the whole program on a CPU, in a size of seconds

On the emulation in part ``ratio``: in fp32 without TF32 an H200 does about 50 TFLOP/s and moves
about 12.5 G elements/s over a link of 50 GB/s, the same ratio as 50 TFLOP/s over 25 GB/s in half
precision on an RTX 4070. No setting of the card is touched. Memory-bound operations are relatively
cheaper than on the emulated card, so a step is a little shorter against its copies.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("hf_pyao") is None:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from bench.gpu_parts import Suite

RESULTS = ROOT / "recipes" / "results" / "gpu"
SMOKE_RESULTS = Path("outputs") / "gpu-smoke"
CUT_SHORT = 3
"""Exit status when the time budget ended first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite. 0: all done; 1: something is wrong; 2: cannot run here; 3: time ran out."""
    from hf_pyao.errors import PyAOError

    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except PyAOError as error:
        print(f"gpu_suite.py: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from bench.gpu_parts import PARTS
    from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES

    parts = "\n".join(f"  {name:<8} {part.summary}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python recipes/gpu_suite.py",
        description=__doc__,
        epilog=f"parts, in their order:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--model", nargs="+", choices=PAPER_SIZES, default=list(PAPER_SIZES), metavar="MODEL"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all of pyao bench")
    parser.add_argument("--list", action="store_true", help="say what would be done, and end")
    parser.add_argument("--resume", action="store_true", help="keep rows that were measured before")
    parser.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="end in time, whatever is left"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"default: {_short(RESULTS)}")
    parser.add_argument("--smoke", action="store_true", help="try the program on a CPU")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the parts that *args* ask for; return the exit status.

    Raises:
        PyAOError: there is no accelerator, or a method is unknown.
    """
    from bench.gpu_parts import PARTS

    suite = make_suite(args)
    names = [name for name in PARTS if name in args.part]
    if args.list:
        print_list(names, suite)
        return 0
    look_at_device(suite)
    for name in names:
        suite.progress(f"part {name}: {PARTS[name].summary}")
        PARTS[name].run(suite)
    for path in summarise(suite):
        suite.progress(f"written: {path}")
    for problem in suite.problems:
        suite.progress(f"WRONG: {problem}")
    if suite.is_cut_short:
        suite.progress("the time budget is used up; go on with --resume")
    return 1 if suite.problems else CUT_SHORT if suite.is_cut_short else 0


def make_suite(args: argparse.Namespace) -> Suite:
    """Return the suite that *args* ask for.

    Raises:
        ConfigError: a method is unknown.
    """
    from bench.gpu_parts import Suite, methods_of
    from hf_pyao.tools.bench.methods import find_method
    from hf_pyao.tools.bench.processes import Deadline

    methods = tuple(args.methods or methods_of(args.smoke))
    for method in methods:
        find_method(method)
    start = time.monotonic()
    return Suite(
        output=args.output or (SMOKE_RESULTS if args.smoke else RESULTS),
        models=tuple(args.model),
        methods=methods,
        is_smoke=args.smoke,
        resumes=args.resume,
        deadline=Deadline.after(args.time_budget),
        device={},
        link={},
        progress=lambda line: print(f"[{time.monotonic() - start:5.0f} s] {line}", flush=True),
    )


def look_at_device(suite: Suite) -> None:
    """Describe the device and measure its link, in a process that ends before the others begin.

    Raises:
        ConfigError: there is no accelerator, and this is no smoke run.
    """
    from hf_pyao.errors import ConfigError
    from hf_pyao.tools.bench.harness import describe_machine
    from hf_pyao.tools.bench.processes import probe

    name = "cpu" if suite.is_smoke else "auto"
    suite.device, suite.link, _ = probe(name, with_speeds=True)
    suite.progress(describe_machine(suite.device, suite.link))
    if suite.device["memory_gib"] is None and not suite.is_smoke:
        raise ConfigError(
            "torch finds no accelerator here, and all parts need one. --smoke tries the program "
            "on a CPU."
        )


def print_list(names: Sequence[str], suite: Suite) -> None:
    """Say what would be done."""
    from bench.gpu_parts import PARTS, BenchPart

    for name in names:
        part = PARTS[name]
        print(f"{name:<8} {part.summary}")
        if isinstance(part.run, BenchPart):
            models = (part.run.smoke_model,) if suite.is_smoke else suite.models
            for architecture in models:
                setup, trials = part.run.work(architecture, suite)
                print(f"         {name}-{architecture}: {setup.describe(None)}")
            print(f"         methods: {', '.join(trial.method for trial in trials)}")


def summarise(suite: Suite) -> list[Path]:
    """Write all results in the output folder as one Markdown page; return the files."""
    from bench.gpu_parts import PARTS
    from hf_pyao.tools.report.kinds import read_document
    from hf_pyao.tools.report.pages import write_page

    order = list(PARTS)
    paths = sorted(suite.output.glob("*.json"), key=lambda path: (_rank(path, order), path.name))
    if not paths:
        return []
    with_plots = importlib.util.find_spec("matplotlib") is not None
    documents = [read_document(path) for path in paths]
    return write_page(documents, suite.output / "summary.md", with_plots=with_plots)


def _rank(path: Path, order: Sequence[str]) -> int:
    part = path.stem.partition("-")[0]
    return order.index(part) if part in order else len(order)


def _short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    raise SystemExit(main())
