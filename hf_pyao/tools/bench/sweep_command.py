"""``pyao sweep``: the command line of budgets, measured or predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.text import echo, one_line, say
from hf_pyao.tools.bench.arguments import check_timeout, default_output
from hf_pyao.tools.bench.setup import BenchSetup
from hf_pyao.tools.estimate.common_arguments import tell
from hf_pyao.tools.estimate.lever_arguments import levers_of
from hf_pyao.tools.estimate.model_specs import parse_model
from hf_pyao.tools.option_table import flag_of
from hf_pyao.tools.packages import need_torch

DESCRIPTION = """\
Sweep over budgets of offloading (policy 'budget': the first k tensors, or bytes, that each forward
saves leave the device): memory, throughput and pack time for each, with their spread over seeds,
and the knee of the curve, or why there is none. Budget 0 is always among them, first and last: what
differs between the two is the machine's noise. Losses and gradients must not depend on the budget,
and are compared bit for bit.

Measured on this machine, each point in a process of its own. On a GPU memory is the peak of what is
allocated, on a CPU what autograd holds after forward; a step is a forward and its backward, without
an optimizer. With --predict no model runs: the step is predicted, for any card.
"""

EPILOG = """\
budgets
  0,1,2,4,8           tensors of each forward
  0:48:4              tensors: 0, 4, ... 48
  0,256MiB,1GiB       bytes of each forward (KiB, MiB, GiB: powers of 1024; KB, MB, GB: of 1000)

examples
  pyao sweep --model opt:1.3b --budgets 0:48:4 --micro-batch 8
  pyao sweep --model llama:1.2b --budgets 0,256MiB,1GiB --checkpointing --output sweep.json
  pyao sweep --model opt:1.3b --predict --device rtx4070 --budgets 0:120:8
  pyao sweep --model llama:1.2b --predict --sequence-length 4096 --long-context --budgets 0:16:2
  pyao report sweep.json -o sweep.html

An interrupt (Ctrl-C) leaves the points that are done in the file.
"""

INTERRUPTED = 130
"""Exit status of a command that was interrupted."""

DEFAULT_SEEDS = 5
DEFAULT_MICRO_BATCH = 4
DEFAULT_CARD = "rtx4070"

_ONLY_MEASURED = ("seeds", "seed", "steps", "warmup", "timeout", "order_seed", "attention")
_ONLY_PREDICTED = ("device_memory", "link", "tflop_per_s", "engine", "optimizer")


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        PyAOError: an option is bad, or the model or device cannot be had.
    """
    need_torch()
    from hf_pyao.plan.paper.sweep import DEFAULT_BUDGETS, parse_budgets

    _check(args)
    budgets = parse_budgets(DEFAULT_BUDGETS if args.budgets is None else args.budgets)
    output = args.output
    if args.predict:
        report = _predicted(args, budgets)
        if output is not None:
            from hf_pyao.plan.documents.schema import write_json

            write_json(output, report)
    else:
        output = output or default_output("sweep", parse_model(args.model).name)
        report = _measured(args, budgets, output)
    tell(report, as_json=args.json, output=None, also_written=[output] if output else [])
    if output is not None and not args.json:
        say(f"plot it: pyao report {one_line(str(output))} -o sweep.html")
    if len(report.points) < report.num_planned:
        say(
            f"pyao: interrupted after {len(report.points)} of {report.num_planned} points.",
            sys.stderr,
        )
        return INTERRUPTED
    return 0 if any(row.memory_bytes for row in report.rows) else 1


def _measured(args: argparse.Namespace, budgets: Any, output: Path) -> Any:
    from tqdm import tqdm

    from hf_pyao.tools.bench.sweep import SweepPlan, run_sweep

    plan = SweepPlan(
        setup=BenchSetup(
            model=parse_model(args.model),
            sequence_length=args.sequence_length,
            dtype=args.dtype,
            attention=args.attention,
            device=_or(args.device, "auto"),
            seed=_or(args.seed, 0),
            num_warmup=_or(args.warmup, 3),
            num_steps=_or(args.steps, 10),
        ),
        budgets=budgets,
        micro_batch=_or(args.micro_batch, DEFAULT_MICRO_BATCH),
        num_seeds=_or(args.seeds, DEFAULT_SEEDS),
        settings=tuple((key, _as_text(value)) for key, value in _settings(args).items()),
        with_checkpointing=args.checkpointing,
        order_seed=_or(args.order_seed, 0),
    )
    is_hidden = not sys.stderr.isatty()
    with tqdm(total=plan.num_points, disable=is_hidden, unit="point", desc="measuring") as bar:
        return run_sweep(
            plan,
            output=output,
            timeout_s=_or(args.timeout, 600.0),
            on_machine=lambda line: bar.set_postfix_str(one_line(line)),
            on_point=lambda point: bar.update(),
        )


def _predicted(args: argparse.Namespace, budgets: Any) -> Any:
    from tqdm import tqdm

    from hf_pyao.config import PyAOConfig
    from hf_pyao.tools.estimate.common_arguments import hardware_of
    from hf_pyao.tools.estimate.predicted_sweep import predict_sweep

    args.device = _or(args.device, DEFAULT_CARD)
    hardware = hardware_of(args)
    if args.tflop_per_s is not None:
        device = dataclasses.replace(hardware.device, tflop_per_s=args.tflop_per_s)
        hardware = dataclasses.replace(hardware, device=device)
    is_hidden = args.json or not sys.stderr.isatty()
    with tqdm(
        total=len(budgets.values), disable=is_hidden, leave=False, unit="budget", desc="predicting"
    ) as bar:
        return predict_sweep(
            parse_model(args.model),
            hardware,
            budgets,
            micro_batch=_or(args.micro_batch, DEFAULT_MICRO_BATCH),
            sequence_length=args.sequence_length,
            dtype=args.dtype,
            checkpointing=args.checkpointing,
            settings=PyAOConfig(**_settings(args)),
            engine=_or(args.engine, "plain"),
            optimizer=_or(args.optimizer, "adamw"),
            on_point=lambda point: bar.update(),
        )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return further fields of ``PyAOConfig``.

    Raises:
        ConfigError: one is bad. Measuring processes would say so for each point.
    """
    from hf_pyao.config import SETTINGS

    found = levers_of(args).given()
    for name in ("min_bytes", "window"):
        if (given := getattr(args, name)) is not None:
            found[name] = SETTINGS[name].kind.check(flag_of(name), given)
    if args.keep_last_layers is not None:
        found["keep_last_layers"] = args.keep_last_layers
    return found


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would change nothing, and numbers out of range.

    Raises:
        ConfigError: there is one.
    """
    if args.timeout is not None:
        check_timeout(args.timeout)
    useless = _ONLY_MEASURED if args.predict else _ONLY_PREDICTED
    given = [flag_of(name) for name in useless if getattr(args, name) is not None]
    if given and args.predict:
        raise ConfigError(
            f"{', '.join(given)} would change nothing with --predict, which runs no model. Drop "
            "one or the other.",
            key="setting-without-effect",
        )
    if given:
        raise ConfigError(
            f"{', '.join(given)} describe a card that is predicted, and this sweep is measured. "
            "Add --predict, or drop them.",
            key="setting-without-effect",
        )
    _check_checkpointing(args)
    if args.predict:
        _check_arithmetic(args)
    else:
        _check_is_no_card(args.device)


def _check_checkpointing(args: argparse.Namespace) -> None:
    if args.checkpointing and levers_of(args).checkpoint_every:
        given = "--long-context" if args.checkpoint_every is None else "--checkpoint-every"
        raise ConfigError(
            f"--checkpointing and {given} both have layers run again in backward. Drop the first: "
            "the second saves the layers' inputs as it does.",
            key="settings-contradict",
        )


def _check_arithmetic(args: argparse.Namespace) -> None:
    if args.tflop_per_s is not None and not 0 < args.tflop_per_s < 1e6:
        raise ConfigError(
            f"--tflop-per-s is {args.tflop_per_s:g}; expected more than 0 (unit: 1e12 a second).",
            key="setting-value",
        )
    if args.dtype == "float32" and args.tflop_per_s is None:
        raise ConfigError(
            "the speeds of cards are for inputs of 16 bits, and --dtype is float32. Give "
            "--tflop-per-s with what matrix products reach in it.",
            key="speeds-unknown",
        )


def _check_is_no_card(device: str | None) -> None:
    from hf_pyao.plan.hardware.presets import find_hardware

    try:
        card = find_hardware(device or "")
    except ConfigError:
        return
    raise ConfigError(
        f"--device {echo(device)} names a card, and this sweep is measured on this machine. Add "
        f"--predict to use the speeds of {card.name}, or give auto, cpu, cuda, ...",
        key="setting-without-effect",
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _as_text(value: Any) -> str:
    """Return *value* as ``pyao:key=value`` methods read it."""
    return value if isinstance(value, str) else json.dumps(value)
