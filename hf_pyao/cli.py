"""``pyao``: the command line of hf_pyao. ``pyao --help`` imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
a Chrome trace of steps, for chrome://tracing and Perfetto. Beside a page of a profile, a snapshot
(.pickle) has the memory of its step, for pytorch.org/memory_viz.
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
    from hf_pyao.settings.removed import refuse_removed_options
    from hf_pyao.tools.old_commands import renamed

    words = renamed(sys.argv[1:] if argv is None else argv)
    if not words:  # what there is to ask
        say(f"{DESCRIPTION}\npyao COMMAND --help lists the options of a command.")
        return 0
    try:
        refuse_removed_options(words)
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
    from hf_pyao.tools.advise import command as advise
    from hf_pyao.tools.bench import arguments as bench
    from hf_pyao.tools.bench import sweep_command as sweep
    from hf_pyao.tools.estimate import command as estimate
    from hf_pyao.tools.estimate import plan_command as plan
    from hf_pyao.tools.estimate import profile_command as profile
    from hf_pyao.tools.option_table import add_options

    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="pyao", description=DESCRIPTION, formatter_class=as_written
    )
    parser.add_argument("--version", action="version", version=f"hf_pyao {hf_pyao.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    rows = (
        ("bench", "compare ways to save activation memory", *_texts(bench, bench.epilog())),
        ("estimate", "what fits on which card, without one", *_texts(estimate, estimate.epilog())),
        ("profile", "what the steps of a script take", *_texts(profile)),
        ("advise", "which settings a script should run with", *_texts(advise)),
        ("plan", "the fastest plan that fits, and why", *_texts(plan)),
        ("sweep", "memory and speed over budgets of offloading", *_texts(sweep)),
        ("report", "tables and plots of results", REPORT_DESCRIPTION, REPORT_EPILOG, _report),
        ("doctor", "look at this machine", DOCTOR_DESCRIPTION, None, _doctor),
    )
    for name, help, description, epilog, run in rows:
        command = commands.add_parser(
            name, help=help, description=description, epilog=epilog, formatter_class=as_written
        )
        add_options(command, name)
        command.set_defaults(run=_estimate if name == "estimate" else run)
    return parser


def _texts(module: Any, epilog: str | None = None) -> tuple[Any, Any, Any]:
    """Return what stands above and below a command's options, and what runs it."""
    below = module.EPILOG if epilog is None else epilog
    return module.DESCRIPTION, below, module.run_from_arguments


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
    snapshots = [] if args.output.suffix == ".json" else _snapshots(documents)
    with_plots = not args.no_plots
    for path in write_page(documents, args.output, with_plots=with_plots, snapshots=snapshots):
        say(f"written: {one_line(str(path))}")
    return 0


def _snapshots(documents: list[Document]) -> list[bytes]:
    """Return what is on the device in steps of profiles, for pytorch.org/memory_viz."""
    from hf_pyao.plan.documents.profile import Profile

    profiles = [each for each in documents if isinstance(each, Profile) and each.program]
    if not profiles:
        return []
    from hf_pyao.plan.predictor.profile_steps import snapshot_of

    return [found for each in profiles if (found := snapshot_of(each)) is not None]


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
    from hf_pyao.plan.predictor.profile_steps import steps_of

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
