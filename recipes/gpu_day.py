"""Ask a GPU everything in thirteen minutes: two commands, the second right behind the first.

    python recipes/gpu_day.py --list
    python recipes/gpu_day.py --output DAY --budget 540
    python recipes/gpu_day.py --output DAY2 --resume DAY --parts second first --budget 230
    python recipes/gpu_day.py --smoke          # the whole program on a CPU, in a size of minutes

Needs a checkout, torch, transformers and accelerate; peft for adapters, pytest for the tests. Each
part runs in a process of its own, for at most twice the seconds that --list shows. Each figure is
appended to day.jsonl in the folder as it comes. At the end the folder has five files: day.jsonl
(figures), day.md (predicted, measured, ratio), tests.txt (a line a test), trace.json.gz (for
Perfetto) and log.txt. With --resume a later command, on another machine too, goes on from an
earlier folder: it copies the figures and measures what is missing.

Predictions are made beforehand, on any machine: python recipes/gpu_day.py --predict
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from on_gpu.parts import FIRST, LATER, PARTS, SECOND, Request

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("hf_pyao") is None:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from on_gpu.day import Journal

PREDICTIONS = ROOT / "recipes" / "results" / "gpu_predictions.json"
PAGE = ROOT / "recipes" / "results" / "gpu_day.md"
CUT_SHORT = 3
"""Exit status when the budget ended first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the day. 0: all done; 1: something is wrong; 2: cannot run here; 3: time ran out."""
    args = make_parser().parse_args(argv)
    if args.list:
        print_list()
        return 0
    from hf_pyao.errors import PyAOError

    try:
        return write_predictions() if args.predict else run(args)
    except PyAOError as error:
        print(f"gpu_day.py: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parts = "\n".join(f"  {name:<3} {part.summary}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python recipes/gpu_day.py",
        description=__doc__,
        epilog=f"parts, in their order:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        choices=[*PARTS, FIRST, SECOND, LATER],
        default=[FIRST],
        metavar="PART",
        help="by name, or all of the first or the second command, or those for a later day "
        "(default: first; with --smoke all)",
    )
    add("--output", type=Path, default=Path("outputs/gpu_day"), metavar="FOLDER")
    add("--budget", type=float, metavar="SECONDS", help="end in time, whatever is left")
    add("--resume", type=Path, metavar="FOLDER", help="go on from the figures of an earlier day")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of TRL and Liger, to compare with")
    add("--device", default="auto", help="as pyao bench takes it (default: the accelerator)")
    add("--smoke", action="store_true", help="try the program on a CPU, or on what --device says")
    add("--predict", action="store_true", help="write the predictions for cards that may come")
    add("--list", action="store_true", help="say what would be done, and end")
    return parser


def print_list() -> None:
    """Say what the commands do, and how long that takes."""
    for command in (FIRST, SECOND, LATER):
        parts = {name: part for name, part in PARTS.items() if part.command == command}
        print(f"{command} command: {sum(part.seconds for part in parts.values())} s")
        for name, part in parts.items():
            print(f"  {name:<3}{part.seconds:>5} s  {part.summary}")


def run(args: argparse.Namespace) -> int:
    """Run the parts that *args* ask for; return the exit status.

    Raises:
        ConfigError: there is no accelerator, or no earlier day to go on from.
    """
    from hf_pyao.config import is_switched_off
    from hf_pyao.errors import ConfigError
    from on_gpu.day import (
        FIGURES,
        Deadline,
        Journal,
        problems_of,
        read_lines,
        run_parts,
        unpack_wheels,
    )

    if is_switched_off():
        raise ConfigError("PYAO=off is set, and the day would measure nothing. Unset it.")
    deadline = Deadline.after(args.budget)
    say = teller(args.output)
    earlier = []
    if args.resume is not None:
        if not (args.resume / FIGURES).is_file():
            raise ConfigError(
                f"--resume is {args.resume}, which has no {FIGURES}. Give its folder."
            )
        earlier = read_lines(args.resume)
    journal = Journal(args.output / FIGURES, say)
    if not (args.output / FIGURES).exists():
        for line in earlier:
            journal.add(line)
    else:
        journal.lines += read_lines(args.output)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as wheels:
        if args.wheels is not None:
            names = unpack_wheels(args.wheels, Path(wheels))
            say(f"wheels: {', '.join(names) or 'none'}")
            sys.path.append(wheels)
        device = look_at_device(args, journal, say)
        request = Request(
            part="",
            device=device,
            is_smoke=args.smoke,
            output=args.output.resolve(),
            limit_s=float("inf"),
        )
        is_enough = run_parts(chosen(args), request, journal, deadline, say)
    write_page(args.output / "day.md", journal, say)
    problems = problems_of(journal.latest)
    for problem in problems:
        say(f"WRONG: {problem}")
    if not is_enough:
        say("the budget is used up: go on with --resume")
    return 1 if problems else 0 if is_enough else CUT_SHORT


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the parts that are asked for, in the order in which they are."""
    asked = [FIRST, SECOND, LATER] if args.smoke and args.parts == [FIRST] else args.parts
    found = [n for each in asked for n, part in PARTS.items() if each in (n, part.command)]
    return list(dict.fromkeys(found))


def teller(folder: Path) -> Callable[[str], None]:
    """Return what prints a line with the time, and adds it to the log in *folder*."""
    start = time.monotonic()

    def say(line: str) -> None:
        text = f"[{time.monotonic() - start:5.0f} s] {line}"
        print(text, flush=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "log.txt").open("a", encoding="utf-8") as log:
                log.write(text + "\n")
        except OSError:
            pass  # it is printed, and figures matter more

    return say


def look_at_device(args: argparse.Namespace, journal: Journal, say: Callable[[str], None]) -> str:
    """Write down device and provenance; return the device's name for the parts.

    Raises:
        ConfigError: there is no accelerator, and this is no smoke run.
    """
    from hf_pyao.errors import ConfigError
    from hf_pyao.plan.documents.provenance import collect_provenance
    from hf_pyao.plan.documents.schema import to_plain
    from hf_pyao.tools.bench.processes import probe

    name = "cpu" if args.smoke and args.device == "auto" else args.device
    device, _, _ = probe(name, with_speeds=False)
    say(f"device: {device['name']}")
    if device["device"] == "cpu" and not args.smoke:
        raise ConfigError(
            "torch finds no accelerator here, and the day needs one. --smoke tries the program on "
            "a CPU."
        )
    about = {"device": device, "provenance": to_plain(collect_provenance())}
    journal.add({"name": "about", "status": "ok", "figures": about, "command": sys.argv[1:]})
    return str(device["device"])


def write_page(path: Path, journal: Journal, say: Callable[[str], None]) -> None:
    """Write the page; what is wrong with its file costs no figure."""
    from on_gpu.page import page_of

    try:
        path.write_text(page_of(*page_input(journal.latest)), encoding="utf-8")
        say(f"written: {path}")
    except OSError as error:
        say(f"{path} cannot be written: {error}")


def page_input(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str], Any]:
    """Return what the page is made of: lines, what they are of, predictions."""
    document = json.loads(PREDICTIONS.read_text(encoding="utf-8")) if PREDICTIONS.exists() else {}
    about = {}
    found = [line["figures"] for line in lines if line["name"] == "about"]
    if found:
        source = found[-1]["provenance"]
        about["device"] = found[-1]["device"]["name"]
        about["command"] = f"`python recipes/{source['command']}`"
        about["commit"] = f"{source['commit']}{' (changed)' * bool(source['is_dirty'])}"
        about["versions"] = ", ".join(f"{k} {v}" for k, v in source["versions"].items() if v)
        about["when"] = source["created_at"]
    if document:
        commit = document["provenance"]["commit"][:12]
        about["predicted"] = f"`python recipes/gpu_day.py --predict`, commit `{commit}`"
    rest = [line for line in lines if line["name"] != "about"]
    return rest, about, document.get("predictions", {})


def write_predictions() -> int:
    """Write the predictions, and the page that has them alone."""
    from on_gpu.page import page_of
    from on_gpu.predict import predictions
    from result_file import write_result

    write_result(PREDICTIONS, kind="gpu_predictions", schema_version=1, predictions=predictions())
    PAGE.write_text(page_of(*page_input([])), encoding="utf-8")
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
