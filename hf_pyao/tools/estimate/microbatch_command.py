"""``pyao microbatch``: which micro-batch to train with on a card, or how long sequences may be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers, or_refuse
from hf_pyao.plan.hardware.presets import HARDWARE, Hardware
from hf_pyao.text import describe_error, one_line, say
from hf_pyao.tools.estimate.command import (
    ENGINES,
    add_card_arguments,
    add_training_arguments,
    hardware_of,
    training_fields_of,
)
from hf_pyao.tools.estimate.lever_arguments import add_lever_arguments, lever_config_of, levers_of

if TYPE_CHECKING:
    from hf_pyao.tools.estimate.fake_step import FakeTraining

DESCRIPTION = """\
Choose a micro-batch without a GPU: the fastest or the largest that fits a card, with gradient
accumulation such that the samples of an optimizer step stay as they are. Or find the longest
sequence. For each size the best plan is looked for: what to keep, to offload and to recompute. One
step of the real model runs on fake tensors at a few sizes, which takes no memory. Nothing is
measured: what is assumed is printed. PyAOTrainer does the same for the model that it trains, and
tries what it chose: --activation_offload_auto_micro_batch.
"""

EPILOG = f"""\
models and devices are named as `pyao estimate --help` lists them, such as opt:1.3b, gpt2:0.8b,
llama:8b, a FOLDER or HUB/NAME with a config.json; {", ".join(HARDWARE)}

examples
  pyao microbatch --model opt:1.3b --device rtx4070 --global-batch 64
  pyao microbatch --model llama:8b --device h200 --sequence-length 4096 --find largest
  pyao microbatch --model gpt2:0.8b --engine zero2 --head-loss chunked --output choice.json
  pyao report choice.json -o choice.html
  pyao microbatch --model llama:1.2b --device rtx4090 --find sequence --long-context
  pyao microbatch --model opt:1.3b --find largest --long-context --checkpoint-every 4
"""

DEFAULT_GLOBAL_BATCH = 64

ASSUMPTION = (
    "where gradients are accumulated on the device, they are there from the start of a micro-batch"
)


def add_microbatch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options and help to *parser*."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    asked = parser.add_argument_group("what is looked for")
    asked.add_argument(
        "--find",
        choices=("fastest", "largest", "sequence"),
        default="fastest",
        help="the micro-batch with the least time a sample, the largest that fits, or the longest "
        "sequence that fits (default: fastest)",
    )
    asked.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of one optimizer step on one device, which micro-batches have to divide "
        f"(default: {DEFAULT_GLOBAL_BATCH})",
    )
    asked.add_argument(
        "--micro-batches",
        metavar="N,N,...",
        help="look at these alone (default: at all that divide the global batch)",
    )
    asked.add_argument(
        "--micro-batch", type=int, metavar="N", help="with --find sequence: samples (default: 1)"
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", required=True, metavar="MODEL", help="see below")
    what.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens of a sample (default: 512; not with --find sequence)",
    )
    add_training_arguments(what)
    add_lever_arguments(
        parser.add_argument_group(
            "what changes the step itself",
            "With a chunked loss or tiles each size is recorded, which takes longer.",
        )
    )
    _add_card_and_output(parser)


def _add_card_and_output(parser: argparse.ArgumentParser) -> None:
    card = add_card_arguments(parser)
    card.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="most host memory for what is offloaded, such as 64GiB (default: any)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--json", action="store_true", help="print JSON, which `pyao report` reads")
    how.add_argument("--output", type=Path, metavar="FILE.json", help="write the JSON here too")


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command; return 1 if nothing fits.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    from hf_pyao.plan.documents.schema import to_plain, write_json
    from hf_pyao.tools.report.tables import markdown_of

    _check_options(args)
    report = microbatch_report(args, shows_progress=not args.json and sys.stderr.isatty())
    if args.output is not None:
        write_json(args.output, report)
    if args.json:
        say(json.dumps(to_plain(report), indent=2))
    else:
        say(markdown_of(report))
        if args.output is not None:
            say(f"written: {one_line(str(args.output))}")
    return 0 if report.chosen is not None else 1


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is recorded."""
    for option, least in (
        ("sequence_length", 2),
        ("micro_batch", 1),
        ("global_batch", 1),
        ("lora", 1),
    ):
        value = getattr(args, option)
        if value is not None and value < least:
            flag = "--" + option.replace("_", "-")
            raise ConfigError(f"{flag} is {value}; expected {least} or more.")
    levers_of(args)
    is_sequence = args.find == "sequence"
    for flag, value, is_for_sequences in (
        ("--micro-batch", args.micro_batch, True),
        ("--micro-batches", args.micro_batches, False),
        ("--sequence-length", args.sequence_length, False),
    ):
        if value is not None and is_for_sequences != is_sequence:
            remedy = "--find sequence" if is_for_sequences else "--find fastest or largest"
            raise ConfigError(
                f"{flag} is given, which has no effect with --find {args.find}: drop it, or take "
                f"{remedy}."
            )


def _sizes_of(text: str | None) -> list[int] | None:
    """Return the micro-batches that an option names.

    Raises:
        ConfigError: it names none, or something else.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--micro-batches is {text!r}; expected whole numbers of samples, such as 2,4,8."
        )
    return [int(part) for part in parts]


def microbatch_report(args: argparse.Namespace, *, shows_progress: bool = False) -> Any:
    """Choose as the options say.

    Returns:
        A :class:`~hf_pyao.plan.documents.microbatch.MicroBatchReport`.

    Raises:
        ConfigError: an option is bad, or the model cannot be run on fake tensors.
    """
    from hf_pyao.plan.documents.microbatch import MicroBatchReport
    from hf_pyao.plan.documents.provenance import collect_provenance
    from hf_pyao.plan.micro_batch.choice import accumulation_of
    from hf_pyao.tools.estimate.assumptions import assumptions_for
    from hf_pyao.tools.estimate.card_memory import card_memory
    from hf_pyao.tools.estimate.model_specs import config_of, parse_model

    hardware = hardware_of(args)
    kernels = training_fields_of(args, hardware)["kernels"]
    memory = card_memory(hardware, kernels)
    limit_bytes = memory.limit_bytes
    spec = parse_model(args.model)
    config = config_of(spec)
    is_sequence = args.find == "sequence"
    if is_sequence and args.global_batch is not None:
        accumulation_of(args.global_batch, args.micro_batch or 1)
    find = _longest if is_sequence else _micro_batch
    choice, num_recordings = find(args, config, hardware, limit_bytes, shows_progress)
    trained = "" if args.lora is None else f", LoRA of rank {args.lora}"
    levers = levers_of(args)
    changed = f", {levers.describe()}" if levers.describe() else ""
    what = "Longest sequence" if is_sequence else f"{args.find.capitalize()} micro-batch"
    return MicroBatchReport(
        title=f"{what}: {spec.name}{trained}{changed} on {hardware.name}, {args.engine}",
        find=args.find,
        global_batch=None if is_sequence else args.global_batch or DEFAULT_GLOBAL_BATCH,
        limit_bytes=limit_bytes,
        chosen=choice.chosen,
        verdict=choice.reason,
        setup={
            "model": dataclasses.asdict(spec),
            "lora_rank": args.lora,
            "engine": args.engine,
            "optimizer": args.optimizer,
            "optimizer_step": args.optimizer_step,
            "deterministic": args.deterministic,
            "attention": args.attention,
            **levers.settings(),
            "host_memory": args.host_memory,
            "num_recorded_steps": num_recordings,
        },
        hardware=dataclasses.asdict(hardware),
        assumptions=[*assumptions_for(kernels), ASSUMPTION, str(memory)],
        provenance=collect_provenance(),
        rows=list(choice.rows),
    )


def _micro_batch(
    args: argparse.Namespace,
    config: Any,
    hardware: Hardware,
    limit_bytes: int,
    shows_progress: bool,
) -> tuple[Any, int]:
    """Return the choice of a micro-batch, and how many steps were recorded."""
    from hf_pyao.plan.micro_batch.choice import choose_micro_batch, divisors_of
    from hf_pyao.plan.micro_batch.sized_steps import SizedLevers, SizedSteps
    from hf_pyao.tools.estimate.positions import check_sequence_length

    length = args.sequence_length or 512
    check_sequence_length(config, length)
    global_batch = args.global_batch or DEFAULT_GLOBAL_BATCH
    sizes = _sizes_of(args.micro_batches)
    training = _training(args, config, hardware)
    record = _recorder(args, training)
    steps = SizedLevers(
        lambda levers: SizedSteps(lambda size: record(size, length, levers), scales=levers.scales)
    )
    best = _best(args, hardware, training, limit_bytes)
    with _bar(shows_progress, len(sizes or divisors_of(global_batch)), "size") as bar:

        def best_at(size: int) -> Any:
            found = best(partial(steps.at, size), is_accumulating=size < global_batch)
            bar.update()
            return found

        choice = choose_micro_batch(
            best_at,
            limit_bytes=limit_bytes,
            global_batch=global_batch,
            sequence_length=length,
            find=args.find,
            sizes=sizes,
        )
    return choice, steps.num_recordings


def _longest(
    args: argparse.Namespace,
    config: Any,
    hardware: Hardware,
    limit_bytes: int,
    shows_progress: bool,
) -> tuple[Any, int]:
    """Return the choice of a length, and how many steps were recorded."""
    from hf_pyao.plan.micro_batch.choice import LENGTH_STEP, longest_sequence
    from hf_pyao.plan.micro_batch.sized_steps import SizedLevers, SizedSteps
    from hf_pyao.tools.estimate.positions import most_positions

    micro_batch = args.micro_batch or 1
    most = most_positions(config)
    training = _training(args, config, hardware)
    record = _recorder(args, training)
    points = (1, 2, 3)
    has_points = most is None or most >= max(points) * LENGTH_STEP
    steps = SizedLevers(
        lambda levers: SizedSteps(
            lambda multiple: record(micro_batch, multiple * LENGTH_STEP, levers),
            points=points,
            scales=levers.scales and has_points,
        )
    )
    best = _best(args, hardware, training, limit_bytes)
    is_accumulating = args.global_batch is None or args.global_batch > micro_batch
    with _bar(shows_progress, None, "length") as bar:

        def best_at(length: int) -> Any:
            at_length = partial(steps.at, length // LENGTH_STEP)
            found = best(at_length, is_accumulating=is_accumulating)
            bar.update()
            return found

        choice = longest_sequence(
            best_at, limit_bytes=limit_bytes, micro_batch=micro_batch, most_length=most
        )
    return choice, steps.num_recordings


def _bar(shows_progress: bool, total: int | None, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total, disable=not shows_progress, leave=False, unit=unit, desc="looking for plans"
    )


def _training(args: argparse.Namespace, config: Any, hardware: Hardware) -> FakeTraining:
    """Return the model, as the options train it."""
    from hf_pyao.tools.estimate.fake_step import FakeTraining

    return FakeTraining(config=config, **training_fields_of(args, hardware))


def _recorder(
    args: argparse.Namespace, training: FakeTraining
) -> Callable[[int, int, Levers], Any]:
    """Return what records the step at a micro-batch and a length, with certain levers."""
    from hf_pyao.tools.estimate.recorded_step import record_step

    configured = levers_of(args)
    from hf_pyao.model.fake_cuda.quiet import quiet

    def record(micro_batch: int, length: int, levers: Levers) -> Any:
        if levers != configured:
            with quiet():
                return or_refuse(
                    lambda: record_step(
                        training, micro_batch, length, levers=levers, must_run_again=True
                    )
                )
        try:
            return record_step(training, micro_batch, length, levers=levers)
        except ConfigError:
            raise
        except Exception as error:  # of the model's own code, which may look at values
            raise ConfigError(
                f"the model {training.config.model_type} cannot be run on fake tensors, which "
                f"have no values: {describe_error(error)}"
            ) from error

    return record


def _best(
    args: argparse.Namespace, hardware: Hardware, training: FakeTraining, limit_bytes: int
) -> Callable[..., Any]:
    """Return what finds the best plan for a step."""
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.micro_batch.sized_steps import best_plan, gradients_held
    from hf_pyao.plan.options.plan_request import PlanRequest
    from hf_pyao.plan.predict.predict import operation_times_ms
    from hf_pyao.plan.predict.speed_range import MEASURED
    from hf_pyao.settings import Size

    host_bytes = float("inf")
    if args.host_memory is not None:
        host_bytes = float(Size().check("--host-memory", args.host_memory))
    request = PlanRequest.of_config(
        lever_config_of(args),
        host_limit_bytes=host_bytes,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    device = hardware.device

    def best(step_with: Callable[[Levers], Any], *, is_accumulating: bool) -> Any:
        holds = is_accumulating and ENGINES[args.engine] == "device"

        def record(levers: Levers) -> Any:
            return gradients_held(step_with(levers)) if holds else step_with(levers)

        program = record(request.levers)
        times_ms = operation_times_ms(program, device)
        # `auto` plans after it has measured: these are the speeds that it finds.
        planner = request.planner_of(program, times_ms, hardware.link, {}, speed_ratios=MEASURED)
        found = best_plan(request.choice(planner, record, device=device), limit_bytes)
        later_bytes = training.optimizer_step_bytes(step_with(request.levers))
        if later_bytes <= found.peak_bytes:
            return found
        fits = found.fits and later_bytes <= limit_bytes
        return dataclasses.replace(found, peak_bytes=later_bytes, fits=fits)

    return best
