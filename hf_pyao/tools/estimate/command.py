"""``pyao estimate``: the command line of what a training would take."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import HARDWARE, Hardware
from hf_pyao.plan.weights.base_names import described
from hf_pyao.tools.answers import answered
from hf_pyao.tools.estimate.common_arguments import (
    hardware_of,
    lengths_of,
    tell,
    training_fields,
    training_fields_of,
    training_options,
)
from hf_pyao.tools.estimate.model_sizes import MODEL_SIZES
from hf_pyao.tools.progress import Progress

DESCRIPTION = """\
Estimate, without a GPU, what training a model takes on a card, for each way to save memory: the
largest micro-batch, the longest sequence, the peak and its cause, the time of a step. With --find,
choose a micro-batch, a sequence length or a number of layers instead: for each size the fastest
plan is searched, which keeps, offloads or recomputes each saved tensor. One step of the real model
runs on fake tensors, which take no memory; other sizes and plans are computed from it. Nothing is
measured; the output lists what is assumed.
"""

DEFAULT_LENGTH = 512
"""Tokens of a sample."""


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    from hf_pyao.plan.documents.estimate import EstimateReport
    from hf_pyao.plan.documents.schema import write_json

    hardware = hardware_of(args)
    _check_options(args)
    allocator = AllocatorSettings.parse(args.alloc_conf)

    def compute() -> EstimateReport:
        found: EstimateReport = estimate_report(
            args.model,
            hardware,
            sequence_length=_lengths_of(args)[1],
            shortest=_lengths_of(args)[0],
            micro_batch=args.micro_batch,
            allocator=allocator,
            with_longest=not args.no_longest_sequence,
            num_processes=args.processes or min(2, os.cpu_count() or 1),
            shows_progress=not args.json,
            **training_options(args),
        )
        return found

    report = answered(args, args.model, EstimateReport, compute, tells=not args.json)
    if args.step is not None:
        write_json(args.step, _step(args, report, hardware))
    also_written = [] if args.step is None else [args.step]
    tell(report, as_json=args.json, output=args.output, also_written=also_written)
    return 0


def _lengths_of(args: argparse.Namespace) -> tuple[int | None, int]:
    """Return the tokens of the shortest sample, None where all are as long, and of the longest."""
    return lengths_of(args) or (None, args.sequence_length or DEFAULT_LENGTH)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is estimated."""
    if args.step is not None:
        from hf_pyao.plan.documents.run import check_report_path
        from hf_pyao.tools.estimate.one_step import check_method

        check_method(args.step_method)
        check_report_path(args.step, "--step")
        if args.output is not None and os.path.abspath(args.output) == os.path.abspath(args.step):
            raise ConfigError(
                "--output and --step name the same file: give each one of its own.",
                key="settings-contradict",
            )
    elif args.step_method is not None:
        raise ConfigError(
            "--step-method says which way --step shows: give --step FILE.json too.",
            key="setting-missing",
        )


def _step(args: argparse.Namespace, report: Any, hardware: Hardware) -> Any:
    """Return the step that is asked for."""
    from hf_pyao.tools.estimate.model_specs import config_of, parse_model
    from hf_pyao.tools.estimate.one_step import step_of

    options = {
        "sequence_length": _lengths_of(args)[1],
        "allocator": AllocatorSettings.parse(args.alloc_conf),
        **training_fields_of(args, hardware),
    }
    return step_of(report, config_of(parse_model(args.model)), hardware, options, args.step_method)


def estimate_report(
    model: str,
    hardware: Hardware,
    *,
    sequence_length: int = 512,
    shortest: int | None = None,
    micro_batch: int | None = None,
    allocator: AllocatorSettings | None = None,
    with_longest: bool = True,
    num_processes: int = 1,
    shows_progress: bool = False,
    **training: Any,
) -> Any:
    """Estimate all ways to train *model* on *hardware*.

    Args:
        model: as :func:`~hf_pyao.tools.estimate.model_specs.parse_model` reads it.
        hardware: the card.
        sequence_length: tokens of a sample.
        shortest: tokens of the shortest one, where lengths vary; None: they do not.
        micro_batch: samples that times and peaks are for; None: the most that fit.
        allocator: settings of PyTorch's allocator; None: its default.
        with_longest: look for the longest sequences too.
        num_processes: how many work at it.
        shows_progress: tell stderr what is done.
        training: arguments of
            :func:`~hf_pyao.tools.estimate.common_arguments.training_fields`.

    Returns:
        An :class:`~hf_pyao.plan.documents.estimate.EstimateReport`.

    Raises:
        ConfigError: the model is unknown, or has no positions for so long a sequence.
    """
    from hf_pyao.plan.documents.estimate import EstimateReport
    from hf_pyao.plan.documents.provenance import collect_provenance
    from hf_pyao.tools.estimate.assumptions import assumptions_for
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.jobs import all_jobs, run_jobs
    from hf_pyao.tools.estimate.model_specs import check_sequence_length, config_of, parse_model
    from hf_pyao.tools.estimate.verdict_text import verdict

    spec = parse_model(model)
    config = config_of(spec)
    check_sequence_length(config, sequence_length)
    fields = training_fields(hardware, **training)
    memory = card_memory(hardware, fields["kernels"])
    jobs = all_jobs(
        config=config,
        hardware=hardware,
        options={
            "sequence_length": sequence_length,
            "shortest": shortest,
            "allocator": allocator,
            **fields,
        },
        micro_batch=micro_batch,
        with_longest=with_longest,
    )
    num_cases = sum(len(job.ways) for job in jobs)
    with Progress("estimating", num_cases, "ways", is_shown=shows_progress) as progress:
        rows, num_recordings = run_jobs(jobs, num_processes, progress.done)
    rank, engine = fields["lora_rank"], training.get("engine", "plain")
    trained = "" if rank is None else f", LoRA of rank {rank}{described(fields['base'])}"
    return EstimateReport(
        title=f"{spec.name}{trained} on {hardware.name}, {sequence_length} tokens, {engine}",
        setup={
            "model": dataclasses.asdict(spec),
            "sequence_length": sequence_length,
            "shortest": shortest,
            "micro_batch": micro_batch,
            **training,
            "alloc_conf": str(allocator or ""),
            "num_recorded_steps": num_recordings,
        },
        hardware=dataclasses.asdict(hardware),
        assumptions=assumptions_for(fields["kernels"]),
        memory=[each._asdict() for each in memory.beside],
        limit_bytes=memory.limit_bytes,
        verdict=verdict(rows, hardware, sequence_length),
        provenance=collect_provenance(),
        rows=rows,
    )


def epilog() -> str:
    """Return what stands below the options."""
    sizes = _aligned([(f"{name}:SIZE", ", ".join(table)) for name, table in MODEL_SIZES.items()])
    cards = _aligned(
        [
            (
                card.name,
                f"{card.memory_gib:g} GiB, {card.device.tflop_per_s:.0f} TFLOP/s, "
                f"{card.device.memory_gib_per_s:.0f} GiB/s, link "
                f"{card.link.d2h_gib_per_s:.0f} GiB/s, {card.link.copy_engines} copy engine"
                f"{'s' * (card.link.copy_engines > 1)}",
            )
            for card in HARDWARE.values()
        ]
    )
    return f"""\
models (weights are never made: only shapes matter)
{sizes}
  ARCH:key=value,...  any causal LM of transformers, sized by its config's arguments
  FOLDER or HUB/NAME  its config.json is read, and nothing else

devices (speeds that kernels reach; their source is in the JSON)
{cards}

examples
  pyao estimate --model opt:1.3b --device rtx4070
  pyao estimate --model llama:8b --device h200 --sequence-length 8192 --micro-batch 4
  pyao estimate --model llama:1.2b --lora --device-memory 16GiB --link 12GiB/s
  pyao estimate --model llama:8b --device rtx4070 --lora --base nf4-double
  pyao estimate --model gpt2:0.8b --engine zero2 --output estimate.json
  pyao report estimate.json -o estimate.html
  pyao estimate --model opt:1.3b --find micro-batch --global-batch 64
  pyao estimate --model llama:8b --device h200 --sequence-length 4096 --find largest-micro-batch
  pyao estimate --model llama:1.2b --device rtx4090 --find sequence --long-context
  pyao estimate --model llama:8b --lora --device rtx4090 --find model-size
  pyao estimate --model opt:1.3b --zeroth-order --sequence-length 2048
  pyao estimate --model opt:1.3b --step step.json --step-method "policy all"
  pyao report step.json -o step.html; pyao report step.json -o trace.json
"""


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
