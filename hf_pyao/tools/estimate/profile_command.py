"""``pyao profile``: what the steps of a training take, measured in its script, or predicted."""

from __future__ import annotations

import argparse
import logging

from hf_pyao.errors import ConfigError, PyAOError
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.text import echo, one_line
from hf_pyao.tools.estimate.common_arguments import tell
from hf_pyao.tools.estimate.lever_arguments import given_levers
from hf_pyao.tools.packages import need_torch
from hf_pyao.tools.run_script import check_script, run_script

DESCRIPTION = """\
Measure the first steps of a training script: the time of each part of a layer, forward and
backward, what each saves for backward, the speed of the link. The script runs as it is, unchanged;
the first model in it that has layers is offloaded whole meanwhile (policy `all`; a script that uses
hf_pyao keeps its own settings), and the script is ended when the profile is written.

Or predict the same, without a device and without a script: --model, --device.
"""

EPILOG = """\
examples
  pyao profile train.py --epochs 1                      3 micro-batches, to profile.json
  pyao profile --steps 100 -o opt.json train.py         as many as the PyAO paper
  accelerate launch --module hf_pyao.cli profile train.py   on all ranks: means and extremes
  pyao profile --model opt:1.3b --device rtx4070 -o opt.json   predicted
  pyao profile --model llama:1.2b --sequence-length 8192 --long-context -o long.json
  pyao report profile.json -o profile.html              tables and Figure 2 of the paper
  pyao plan profile.json --try                          plans for these steps, and their times
"""


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, the script has no model that could be profiled, or the file
            cannot be written.
    """
    need_torch()
    if (args.script is None) == (args.model is None):
        raise ConfigError(
            "expected either a script to measure (pyao profile train.py ...) or --model to "
            "predict.",
            key="setting-missing",
        )
    if args.script is not None and given_levers(args):
        raise ConfigError(
            f"{', '.join(given_levers(args))}: of a step that is predicted, and this one is "
            "measured, with the settings that the script has. Set them there, or drop them.",
            key="setting-without-effect",
        )
    profile = _predicted(args) if args.script is None else _measured(args)
    if profile is not None:
        tell(profile, as_json=False, output=None, also_written=[args.output])
    return 0


def _predicted(args: argparse.Namespace) -> Profile:
    from hf_pyao.plan.documents.schema import write_json
    from hf_pyao.tools.estimate.predicted_profile import profile_of, training_of

    profile = profile_of(args, args.model, *training_of(args, args.model))
    write_json(args.output, profile)
    return profile


def _measured(args: argparse.Namespace) -> Profile | None:
    """Run the script; return its profile, on the rank that writes it.

    Raises:
        PyAOError: it has no model that could be profiled.
    """
    from hf_pyao.ranks import process_rank
    from hf_pyao.tools.estimate.script_profiler import ProfileIsDone, ScriptProfiler

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    script = args.script
    check_script(script, is_module=args.module)
    profiler = ScriptProfiler(args.output, args.steps, stops=not args.keep_running)
    with profiler:
        try:
            run_script(script, args.arguments, is_module=args.module)
        except ProfileIsDone:
            pass
        except SystemExit as error:
            if error.code not in (None, 0) or profiler.profile is None:
                raise
    if profiler.profile is None:
        why = profiler.refusal or (
            f"it ended before {args.steps} micro-batches were trained, or no model in it has "
            "layers that are known. Ask for fewer (--steps 1); attach a model that is not "
            "transformers' in the script itself, with its layers named (PyAOConfig(layers=...))"
        )
        raise PyAOError(
            f"nothing was measured in {echo(script)}: {one_line(str(why))}.", key="nothing-measured"
        )
    return profiler.profile if process_rank().is_first else None
