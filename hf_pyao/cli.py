"""``pyao``: the command line of hf_pyao. ``pyao --help`` imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_pyao.errors import PyAOError
from hf_pyao.text import echo, one_line, say
from hf_pyao.tools.packages import need_torch

if TYPE_CHECKING:
    from hf_pyao.tools.report.kinds import Document

DESCRIPTION = """\
Activation offloading for HuggingFace training: tools beside the library.

  pyao doctor                       can this machine offload well, and what to change
  pyao estimate --model opt:1.3b    what fits on which card, and how fast, without one; or the
                                    fastest micro-batch, or the longest sequence (--find)
  pyao advise train.py ...          which settings a script should run with, ready to paste
  pyao profile train.py ...         what the steps of a script take, part by part
  pyao plan profile.json            the fastest plan that fits, what it does and why; or the
                                    time and memory of plans that you have (--try)
  pyao bench --model ...            compare it with checkpointing and other offloaders
  pyao sweep --model ...            memory and speed over budgets, and where the knee is
  pyao report FILE.json -o out.html turn results and run reports into tables and plots
"""

REPORT_DESCRIPTION = """\
Turn JSON files that hf_pyao wrote into tables and plots: results of `pyao bench` and `pyao
estimate`, plans, and the reports and profiles of training runs (--activation_offload_report,
--activation_offload_profile). Files of another version are refused. An output that ends in .json is
a Chrome trace of steps, for chrome://tracing and Perfetto.
"""

REPORT_EPILOG = """\
examples
  pyao report results/*.json                 tables to the terminal, as Markdown
  pyao report bench.json -o bench.md         and a PNG of memory versus time beside it
  pyao report run.json bench.json -o all.html  one page that needs nothing beside it
  pyao report step.json -o trace.json        what ran when, for a trace viewer
"""

DOCTOR_DESCRIPTION = """\
Report the device and its speed, its link to the host (measured with copies), pinned memory,
NUMA and versions. Say what to change, and which way to train is fastest here. Changes nothing.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    2: something that was asked for cannot be; 130: Ctrl-C.
    """
    from hf_pyao.tools.old_commands import renamed

    words = renamed(sys.argv[1:] if argv is None else argv)
    if not words:  # what there is to ask
        say(f"{DESCRIPTION}\npyao COMMAND --help lists the options of a command.")
        return 0
    try:
        args = make_parser().parse_args(words)
        run: Callable[[argparse.Namespace], int] = args.run
        # As it is imported it warns of what the host's processor lacks, which no command uses.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        return run(args)
    except PyAOError as error:
        say(f"pyao: {one_line(str(error))}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("pyao: interrupted", sys.stderr)
        if argv in (None, sys.argv[1:]):  # a process of its own, which torch takes seconds to end
            os._exit(130)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with its subcommands."""
    import hf_pyao
    from hf_pyao.tools.advise.command import add_advise_arguments
    from hf_pyao.tools.bench import sweep_command
    from hf_pyao.tools.bench.arguments import add_bench_arguments, run_from_arguments
    from hf_pyao.tools.estimate.command import add_estimate_arguments
    from hf_pyao.tools.estimate.find_command import add_find_arguments
    from hf_pyao.tools.estimate.plan_command import add_plan_arguments
    from hf_pyao.tools.estimate.profile_command import add_profile_arguments

    parser = argparse.ArgumentParser(
        prog="pyao",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf_pyao {hf_pyao.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    bench = commands.add_parser("bench", help="compare ways to save activation memory")
    add_bench_arguments(bench)
    bench.set_defaults(run=run_from_arguments)

    estimate = commands.add_parser("estimate", help="what fits on which card, without one")
    add_estimate_arguments(estimate)
    add_find_arguments(estimate)
    estimate.set_defaults(run=_estimate)

    profile = commands.add_parser("profile", help="what the steps of a script take")
    add_profile_arguments(profile)
    profile.set_defaults(run=_profile)

    advise = commands.add_parser("advise", help="which settings a script should run with")
    add_advise_arguments(advise)
    advise.set_defaults(run=_advise)

    plan = commands.add_parser("plan", help="the fastest plan that fits, and why")
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)

    sweep = commands.add_parser("sweep", help="memory and speed over budgets of offloading")
    sweep_command.add_sweep_arguments(sweep)
    sweep.set_defaults(run=_sweep)

    report = commands.add_parser(
        "report",
        help="tables and plots of results",
        description=REPORT_DESCRIPTION,
        epilog=REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .md, .html or .json file to write"
    )
    report.add_argument(
        "--no-plots", action="store_true", help="tables alone; matplotlib is then not needed"
    )
    report.set_defaults(run=_report)

    doctor = commands.add_parser(
        "doctor",
        help="look at this machine",
        description=DOCTOR_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    doctor.add_argument(
        "--disk",
        metavar="FOLDER",
        help="measure the disk of this folder, too: 1 GiB is written, flushed, read and removed",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON, for a bug report")
    doctor.add_argument(
        "--model",
        default="opt:1.3b",
        metavar="MODEL",
        help="what the verdict is for, as pyao estimate takes it (default: opt:1.3b)",
    )
    doctor.add_argument("--no-verdict", action="store_true", help="leave it out: it takes a minute")
    doctor.set_defaults(run=_doctor)
    return parser


def _estimate(args: argparse.Namespace) -> int:
    from hf_pyao.tools.estimate import command, find_command

    if args.zeroth_order is not None:
        need_torch()
        from hf_pyao.tools.zeroth_order import estimate

        return estimate.run_from_arguments(args)
    if args.find is not None:
        return find_command.run_from_arguments(args)
    find_command.refuse_without_find(args)
    return command.run_from_arguments(args)


def _profile(args: argparse.Namespace) -> int:
    need_torch()
    from hf_pyao.tools.estimate.profile_command import run_from_arguments

    return run_from_arguments(args)


def _advise(args: argparse.Namespace) -> int:
    need_torch()
    from hf_pyao.tools.advise.command import run_from_arguments

    return run_from_arguments(args)


def _plan(args: argparse.Namespace) -> int:
    from hf_pyao.tools.estimate.plan_command import run_from_arguments

    return run_from_arguments(args)


def _sweep(args: argparse.Namespace) -> int:
    need_torch()
    from hf_pyao.tools.bench.sweep_command import run_from_arguments

    return run_from_arguments(args)


def _report(args: argparse.Namespace) -> int:
    from hf_pyao.tools.report.kinds import read_named_document

    documents = [read_named_document(path) for path in args.files]
    if args.output is None:
        from hf_pyao.tools.report.terminal import show

        for document in documents:
            show(document)
        return 0
    if any(os.path.abspath(args.output) == os.path.abspath(path) for path in args.files):
        raise PyAOError(
            f"the output {echo(str(args.output))} is one of the files that are read, which it "
            "would replace. Give another name.",
            key="settings-contradict",
        )
    from hf_pyao.tools.report.pages import write_page

    if args.output.suffix != ".json":
        documents = [part for document in documents for part in _with_steps(document)]
    for path in write_page(documents, args.output, with_plots=not args.no_plots):
        say(f"written: {one_line(str(path))}")
    return 0


def _with_steps(document: Document) -> list[Document]:
    """Return *document*, and behind it a profile's steps over time, or a run's plan."""
    from hf_pyao.plan.documents.plan import Plan
    from hf_pyao.plan.documents.profile import Profile
    from hf_pyao.plan.documents.run import RunReport

    if isinstance(document, RunReport) and isinstance(document.extra.get("plan"), dict):
        return [document, Plan.from_dict(document.extra["plan"], "the plan in the report")]
    if not isinstance(document, Profile) or not (document.timeline or document.program):
        return [document]
    need_torch()
    from hf_pyao.plan.measure.profile_steps import steps_of

    return [document, *steps_of(document)]


def _doctor(args: argparse.Namespace) -> int:
    import json

    need_torch()
    from hf_pyao.tools.bench import doctor
    from hf_pyao.tools.bench.doctor_verdict import verdict_on

    machine = doctor.look(args.device, args.disk)
    findings = doctor.examine(machine)
    verdict = "" if args.no_verdict else verdict_on(machine, args.model).words
    if args.json:
        say(json.dumps(doctor.report_of(machine, findings, verdict).to_dict(), indent=2))
    else:
        say(doctor.render(findings, verdict))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
