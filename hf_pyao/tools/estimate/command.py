"""``pyao estimate``: the command line of what a training would take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.beside_step import FUSED, IMPLEMENTATIONS
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import HARDWARE, Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.text import one_line, say
from hf_pyao.tools.estimate.model_sizes import MODEL_SIZES

DESCRIPTION = """\
Estimate, without a GPU, what training a model would take on a card, by each way to save memory:
the largest micro-batch, the longest sequence, the peak and what sets it, the time of a step. One
step of the real model runs on fake tensors, which takes no memory; figures at other sizes and for
other plans are reckoned from it. Nothing is measured: what is assumed is printed.
"""

ENGINES = {"plain": "device", "zero2": "host"}
"""Name -> where gradients and optimizer are."""

OPTIMIZER_BYTES = {"adamw": 4, "adamw-32bit": 8, "adamw-8bit": 2, "sgd": 0}
"""Bytes of an optimizer's states for each trained parameter, where they are on the device."""


ATTENTIONS = ("flash", "cudnn")
"""Kernels of attention that may be assumed."""


def add_training_arguments(what: argparse._ArgumentGroup) -> None:
    """Add how a model is trained: LoRA, gradients, optimizer."""
    what.add_argument(
        "--lora",
        type=int,
        nargs="?",
        const=16,
        metavar="RANK",
        help="train LoRA adapters of this rank (16) on all linear layers; needs peft",
    )
    what.add_argument(
        "--engine",
        choices=ENGINES,
        default="plain",
        help="plain: gradients and optimizer on the device. zero2: gradients leave as they are "
        "complete, the optimizer is on the host (default: plain)",
    )
    what.add_argument(
        "--optimizer",
        choices=OPTIMIZER_BYTES,
        default="adamw",
        help="its states on the device, with engine plain: two moments in 16 bits (adamw), 32 or "
        "8, or none (default: adamw)",
    )
    what.add_argument(
        "--optimizer-step",
        choices=IMPLEMENTATIONS,
        default=FUSED,
        help="how torch's optimizer goes over weights on the device: fused takes nothing more "
        "(transformers' default), foreach as much as all weights (torch's), for-loop as much as "
        "the two largest (default: fused)",
    )
    what.add_argument(
        "--deterministic",
        action="store_true",
        help="torch.use_deterministic_algorithms(True): kernels of attention allocate more",
    )
    what.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="flash",
        help="the kernel of attention without a mask in 16 bits: FlashAttention-2, or cuDNN's, "
        "which torch prefers on compute capability 9.0 and 10.0 unless "
        "torch.backends.cuda.enable_cudnn_sdp(False) is called (default: flash)",
    )


def given_training(args: argparse.Namespace) -> list[str]:
    """Return the options of :func:`add_training_arguments` that are given."""
    parser = argparse.ArgumentParser(add_help=False)
    add_training_arguments(parser.add_argument_group())
    default = vars(parser.parse_args([]))
    return [
        "--" + name.replace("_", "-")
        for name, value in default.items()
        if getattr(args, name) != value
    ]


def training_fields(
    hardware: Hardware,
    *,
    engine: str = "plain",
    optimizer: str = "adamw",
    optimizer_step: str = FUSED,
    lora_rank: int | None = None,
    deterministic: bool = False,
    attention: str = "flash",
) -> dict[str, Any]:
    """Return fields of :class:`~hf_pyao.tools.estimate.fake_step.FakeTraining`, as the options
    say."""
    return {
        "training_state": ENGINES[engine],
        "optimizer_bytes": OPTIMIZER_BYTES[optimizer],
        "implementation": optimizer_step,
        "lora_rank": lora_rank,
        "kernels": hardware.kernels._replace(
            is_deterministic=deterministic, prefers_cudnn=attention == "cudnn"
        ),
    }


def training_fields_of(args: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Return the same for options of :func:`add_training_arguments`."""
    return training_fields(
        hardware,
        engine=args.engine,
        optimizer=args.optimizer,
        optimizer_step=args.optimizer_step,
        lora_rank=args.lora,
        deterministic=args.deterministic,
        attention=args.attention,
    )


def add_allocator_argument(group: argparse._ActionsContainer) -> None:
    """Add the settings of PyTorch's allocator."""
    group.add_argument(
        "--alloc-conf",
        default="",
        metavar="SETTINGS",
        help="what PYTORCH_CUDA_ALLOC_CONF is to be, such as expandable_segments:True (default: "
        "PyTorch's default)",
    )


def add_card_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the card, its memory and its link; return their group."""
    card = parser.add_argument_group("what it is trained on")
    card.add_argument(
        "--device", default="rtx4070", metavar="NAME", help="see below (default: rtx4070)"
    )
    card.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of the card, such as 12GiB, if another; the CUDA context is taken off",
    )
    card.add_argument(
        "--link",
        metavar="SPEED",
        help="speed of the link in each direction, such as 25GiB/s, if another",
    )
    add_allocator_argument(card)
    return card


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options and help to *parser*."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.epilog = _epilog()
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", required=True, metavar="MODEL", help="see below")
    what.add_argument(
        "--sequence-length", type=int, default=512, help="tokens of a sample (default: 512)"
    )
    what.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="times and peaks for this many samples (default: for the most that fit)",
    )
    add_training_arguments(what)
    add_card_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--no-longest-sequence",
        action="store_true",
        help="do not look for the longest sequence, which takes half of the time",
    )
    how.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes that work at it, 3 at most (default: 2, where there are two cores)",
    )
    how.add_argument("--json", action="store_true", help="print JSON, which `pyao report` reads")
    how.add_argument("--output", type=Path, metavar="FILE.json", help="write the JSON here too")
    how.add_argument(
        "--step",
        type=Path,
        metavar="FILE.json",
        help="write one step over time here: memory, compute, copies; `pyao report` draws it",
    )
    how.add_argument(
        "--step-method",
        metavar="WAY",
        help="which way --step shows, such as 'policy all' (default: the one that the verdict "
        "names)",
    )


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    from hf_pyao.plan.documents.schema import to_plain, write_json
    from hf_pyao.tools.report.tables import markdown_of

    hardware = hardware_of(args)
    _check_options(args)
    report = estimate_report(
        args.model,
        hardware,
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch,
        lora_rank=args.lora,
        engine=args.engine,
        optimizer=args.optimizer,
        optimizer_step=args.optimizer_step,
        deterministic=args.deterministic,
        attention=args.attention,
        allocator=AllocatorSettings.parse(args.alloc_conf),
        with_longest=not args.no_longest_sequence,
        num_processes=args.processes or min(2, os.cpu_count() or 1),
        shows_progress=not args.json and sys.stderr.isatty(),
    )
    if args.output is not None:
        write_json(args.output, report)
    if args.step is not None:
        write_json(args.step, _step(args, report, hardware))
    if args.json:
        say(json.dumps(to_plain(report), indent=2))
        return 0
    say(markdown_of(report))
    for path in (args.output, args.step):
        if path is not None:
            say(f"written: {one_line(str(path))}")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is estimated."""
    for option, least in (
        ("sequence_length", 2),
        ("micro_batch", 1),
        ("lora", 1),
        ("processes", 1),
    ):
        value = getattr(args, option)
        if value is not None and value < least:
            flag = "--" + option.replace("_", "-")
            raise ConfigError(f"{flag} is {value}; expected {least} or more.")
    if args.step is not None:
        from hf_pyao.plan.documents.run import check_report_path
        from hf_pyao.tools.estimate.one_step import check_method

        check_method(args.step_method)
        check_report_path(args.step, "--step")
        if args.output is not None and os.path.abspath(args.output) == os.path.abspath(args.step):
            raise ConfigError("--output and --step name the same file: give each one of its own.")
    elif args.step_method is not None:
        raise ConfigError("--step-method says which way --step shows: give --step FILE.json too.")


def _step(args: argparse.Namespace, report: Any, hardware: Hardware) -> Any:
    """Return the step that is asked for."""
    from hf_pyao.tools.estimate.model_specs import config_of, parse_model
    from hf_pyao.tools.estimate.one_step import step_of

    options = {
        "sequence_length": args.sequence_length,
        "allocator": AllocatorSettings.parse(args.alloc_conf),
        **training_fields_of(args, hardware),
    }
    return step_of(report, config_of(parse_model(args.model)), hardware, options, args.step_method)


def hardware_of(args: argparse.Namespace) -> Hardware:
    """Return the card that the options describe.

    Raises:
        ConfigError: it is unknown, or a size or speed is none.
    """
    from hf_pyao.settings import Size

    hardware = find_hardware(args.device)
    if args.device_memory is not None:
        nbytes = Size().check("--device-memory", args.device_memory)
        hardware = dataclasses.replace(hardware, memory_gib=int(nbytes) / GIB)
    if args.link is not None:
        hardware = hardware.with_link(link_gib_per_s(args.link))
    return hardware


def link_gib_per_s(text: str) -> float:
    """Return the speed that ``--link`` states.

    Raises:
        ConfigError: it is none.
    """
    from hf_pyao.settings import Size

    text = text.strip()
    speed = int(Size().check("--link", text.removesuffix("/s")))
    if not text.endswith("/s") or speed <= 0:
        raise ConfigError(f"--link is {text!r}; expected a speed, such as 25GiB/s or 50GB/s.")
    return speed / GIB


def estimate_report(
    model: str,
    hardware: Hardware,
    *,
    sequence_length: int = 512,
    micro_batch: int | None = None,
    lora_rank: int | None = None,
    engine: str = "plain",
    optimizer: str = "adamw",
    optimizer_step: str = FUSED,
    deterministic: bool = False,
    attention: str = "flash",
    allocator: AllocatorSettings | None = None,
    with_longest: bool = True,
    num_processes: int = 1,
    shows_progress: bool = False,
) -> Any:
    """Estimate all ways to train *model* on *hardware*.

    Args:
        model: as :func:`~hf_pyao.tools.estimate.model_specs.parse_model` reads it.
        hardware: the card.
        sequence_length: tokens of a sample.
        micro_batch: samples that times and peaks are for; None: the most that fit.
        lora_rank: train adapters of this rank; None: all parameters.
        engine: a key of :data:`ENGINES`.
        optimizer: a key of :data:`OPTIMIZER_BYTES`.
        optimizer_step: one of :data:`~hf_pyao.plan.hardware.beside_step.IMPLEMENTATIONS`.
        deterministic: whether kernels run in torch's deterministic mode.
        attention: one of :data:`ATTENTIONS`.
        allocator: settings of PyTorch's allocator; None: its default.
        with_longest: look for the longest sequences too.
        num_processes: how many work at it.
        shows_progress: draw a bar to stderr.

    Returns:
        An :class:`~hf_pyao.plan.documents.estimate.EstimateReport`.

    Raises:
        ConfigError: the model is unknown, or has no positions for so long a sequence.
    """
    from tqdm import tqdm

    from hf_pyao.plan.documents.estimate import EstimateReport
    from hf_pyao.plan.documents.provenance import collect_provenance
    from hf_pyao.tools.estimate.assumptions import assumptions_for
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.jobs import all_jobs, run_jobs
    from hf_pyao.tools.estimate.model_specs import config_of, parse_model
    from hf_pyao.tools.estimate.positions import check_sequence_length
    from hf_pyao.tools.estimate.verdict import verdict

    spec = parse_model(model)
    config = config_of(spec)
    check_sequence_length(config, sequence_length)
    fields = training_fields(
        hardware,
        engine=engine,
        optimizer=optimizer,
        optimizer_step=optimizer_step,
        lora_rank=lora_rank,
        deterministic=deterministic,
        attention=attention,
    )
    memory = card_memory(hardware, fields["kernels"])
    jobs = all_jobs(
        config=config,
        hardware=hardware,
        options={"sequence_length": sequence_length, "allocator": allocator, **fields},
        micro_batch=micro_batch,
        with_longest=with_longest,
    )
    num_cases = sum(len(job.cases) for job in jobs)
    with tqdm(
        total=num_cases, disable=not shows_progress, leave=False, unit="way", desc="estimating"
    ) as bar:
        rows, num_recordings = run_jobs(jobs, num_processes, lambda count: bar.update(count))
    trained = "" if lora_rank is None else f", LoRA of rank {lora_rank}"
    return EstimateReport(
        title=f"{spec.name}{trained} on {hardware.name}, {sequence_length} tokens, {engine}",
        setup={
            "model": dataclasses.asdict(spec),
            "sequence_length": sequence_length,
            "micro_batch": micro_batch,
            "lora_rank": lora_rank,
            "engine": engine,
            "optimizer": optimizer,
            "optimizer_step": optimizer_step,
            "deterministic": deterministic,
            "attention": attention,
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


def _epilog() -> str:
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
  pyao estimate --model gpt2:0.8b --engine zero2 --output estimate.json
  pyao report estimate.json -o estimate.html
  pyao estimate --model opt:1.3b --step step.json --step-method "policy all"
  pyao report step.json -o step.html; pyao report step.json -o trace.json
"""


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
