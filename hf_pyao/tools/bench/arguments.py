"""The harness's command line: ``pyao bench``, whose options ``recipes/bench/board.py`` has too."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timezone
from pathlib import Path

from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.bench import FAILED
from hf_pyao.text import one_line, say
from hf_pyao.tools.bench.harness import run_bench, smoke
from hf_pyao.tools.bench.methods import CUSTOM_PREFIX, find_method, known_methods
from hf_pyao.tools.bench.setup import MAX_MICRO_BATCH, BenchSetup, Trial
from hf_pyao.tools.estimate.common_arguments import tell
from hf_pyao.tools.estimate.model_sizes import MODEL_SIZES
from hf_pyao.tools.estimate.model_specs import parse_model
from hf_pyao.tools.option_table import flag_of

SMOKE_MODEL = (
    "llama:hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,"
    "num_key_value_heads=1,vocab_size=64,max_position_embeddings=64"
)
SMOKE_METHODS = ("none", "checkpoint", "pyao-window", "trl-streams")

DEFAULT_MICRO_BATCH = 4
MAX_TIMEOUT_S = 1e6
"""Eleven days; the system's clocks for waiting end at 24."""

_SHAPE = {
    "sequence_length": "sequence_length",
    "dtype": "dtype",
    "autocast": "autocast",
    "num_warmup": "warmup",
    "num_steps": "steps",
}
"""Field of a setup that the smoke run sets itself -> option."""

DESCRIPTION = """\
Compare ways to save activation memory: same model, data, seed and machine, each method in a process
of its own. One step is a forward and its backward; each is timed on a drained device. Losses and
gradients are compared bit for bit with those of 'none'. Results go to one JSON file, which
`pyao report` turns into tables and plots. A method that cannot run says why in its row.
"""


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the harness as *args* say; print tables; return the exit status.

    Raises:
        PyAOError: an option is bad, or the model or device cannot be had.
    """
    setup, trials = work_of(args)
    output = args.output or default_output("bench", setup.model.name, setup.dtype)
    report = run_bench(
        setup,
        trials,
        output=output,
        timeout_s=args.timeout,
        progress=lambda line: say(one_line(line)),
    )
    say("")
    tell(report, as_json=False, output=None, also_written=[output])
    say(f"plot it: pyao report {one_line(str(output))} -o report.html")
    return 0 if all(row.status != FAILED for row in report.rows) else 1


def work_of(args: argparse.Namespace) -> tuple[BenchSetup, list[Trial]]:
    """Return what is measured, and the trials, one for each method.

    Raises:
        ConfigError: an option is bad, or a method is unknown.
    """
    model = args.model or (SMOKE_MODEL if args.smoke else None)
    if model is None:
        raise ConfigError(
            "no --model is given. Try --model llama:hidden_size=1024,num_hidden_layers=8, or "
            "--smoke; --help has more.",
            key="setting-missing",
        )
    _check_numbers(args)
    shape = {
        field: value for field in _SHAPE if (value := getattr(args, _SHAPE[field])) is not None
    }
    if args.smoke and (shape or args.micro_batch is not None):
        given = ["micro_batch"] if args.micro_batch is not None else []
        given += [_SHAPE[field] for field in shape]
        flags = ", ".join(flag_of(name) for name in given)
        raise ConfigError(
            f"--smoke has shapes and steps of its own, and {flags} would change nothing. Drop "
            f"{flags}, or --smoke.",
            key="setting-without-effect",
        )
    names = args.methods or (SMOKE_METHODS if args.smoke else tuple(known_methods()))
    for name in names:
        find_method(name)
    setup = BenchSetup(
        model=parse_model(model),
        attention=args.attention,
        device=args.device,
        seed=args.seed,
        gradients=args.gradients,
        memory_cap_gib=args.memory_cap_gib,
        ballast_gib=args.ballast_gib,
        **shape,
    )
    micro_batch = args.micro_batch or DEFAULT_MICRO_BATCH
    if args.find_largest:
        micro_batch = MAX_MICRO_BATCH
    if args.smoke:
        setup, micro_batch = smoke(setup), 2
    trials = [
        Trial(method=name, micro_batch=micro_batch, is_search=args.find_largest) for name in names
    ]
    return setup, trials


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers out of range, by the name of their flag.

    Raises:
        ConfigError: one is.
    """
    check_timeout(args.timeout)
    if args.memory_cap_gib is not None and not args.memory_cap_gib > 0:
        raise ConfigError(
            f"--memory-cap-gib is {args.memory_cap_gib:g}; expected more than 0.",
            key="setting-value",
        )


def check_timeout(timeout_s: float) -> None:
    """Refuse a time that a process cannot be given.

    Raises:
        ConfigError: it is out of range.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"--timeout is {timeout_s:g}; expected more than 0 seconds, and at most "
            f"{MAX_TIMEOUT_S:g}.",
            key="setting-value",
        )


def default_output(kind: str, *names: str) -> Path:
    """Return a path below ``outputs/kind``, named by *names*, a model's first, and the time."""
    model, *others = names
    model = re.sub(r"[^A-Za-z0-9.]+", "-", model).strip("-")[:40]
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return Path("outputs") / kind / f"{'-'.join([model, *others, stamp])}.json"


def epilog(program: str = "pyao bench") -> str:
    """Return what stands below the options of *program*."""
    methods = "\n".join(f"  {name:<22} {m.label}" for name, m in known_methods().items())
    by_name = "\n".join(
        f"  {architecture}:SIZE{'':<{8 - len(architecture)}} {', '.join(table)}"
        for architecture, table in MODEL_SIZES.items()
    )
    first = "opt:1.3b"
    return f"""\
models (weights are random: only shapes matter here)
{by_name}
  ARCH:key=value,...  any causal LM of transformers, sized by its config's arguments
  FOLDER or HUB/NAME  its config.json is read, and nothing else

methods
{methods}
  {CUSTOM_PREFIX}key=value,...     hf_pyao with these fields of PyAOConfig; join modules with '+'
  module:function        a function that installs one, of a module on PYTHONPATH

examples
  {program} --model {first} --micro-batch 8
  {program} --model {first} --find-largest --memory-cap-gib 12 --gradients release
  {program} --model {first} --methods none checkpoint pyao:window=67108864
  {program} --smoke
"""
