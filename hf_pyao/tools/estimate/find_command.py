"""``pyao estimate --find``: chooses a micro-batch, the longest sequence, or the deepest model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_pyao.errors import ConfigError
from hf_pyao.levers import Levers, or_refuse
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.solve.collections_paused import few_collections, importing
from hf_pyao.plan.weights.base_names import described
from hf_pyao.tools.answers import answered
from hf_pyao.tools.estimate.command import DEFAULT_LENGTH
from hf_pyao.tools.estimate.common_arguments import (
    ENGINES,
    check_least,
    hardware_of,
    tell,
    training_fields_of,
    training_options,
)
from hf_pyao.tools.estimate.lever_arguments import (
    OFF,
    add_lever_arguments,
    add_streaming_argument,
    ends_on_host_of,
    given_levers,
    lever_config_of,
    levers_of,
    resident_blocks_of,
)
from hf_pyao.tools.packages import need_torch
from hf_pyao.tools.progress import Progress

if TYPE_CHECKING:
    from hf_pyao.tools.estimate.fake_step import FakeTraining

DEFAULT_GLOBAL_BATCH = 64

ASSUMPTION = (
    "where gradients are accumulated on the device, they are there from the start of a micro-batch"
)


FINDS = {
    "micro-batch": "fastest",
    "largest-micro-batch": "largest",
    "sequence": "sequence",
    "model-size": "model-size",
}
"""Value of ``--find`` -> :attr:`~hf_pyao.plan.documents.microbatch.MicroBatchReport.find`."""

NOT_FOR_FINDING = ("no_longest_sequence", "processes", "step", "step_method")
"""Options of ``pyao estimate`` that have no effect with ``--find``."""


def add_find_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--find`` and the options that go with it to the parser of ``pyao estimate``."""
    asked = parser.add_argument_group(
        "to choose a micro-batch, a length or a number of layers",
        "The samples of an optimizer step stay as they are: smaller micro-batches are accumulated. "
        "PyAOTrainer does the same for the model that it trains, and tries what it chose "
        "(--activation_offload_auto_micro_batch).",
    )
    asked.add_argument(
        "--find",
        choices=FINDS,
        help="the micro-batch with the least time per sample, the largest one that fits, the "
        "longest sequence that fits, or the most layers that the model may have (model-size)",
    )
    asked.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of one optimizer step on one device; micro-batches have to divide it "
        f"(default: {DEFAULT_GLOBAL_BATCH})",
    )
    asked.add_argument(
        "--micro-batches",
        metavar="N,N,...",
        help="consider these alone (default: all that divide the global batch)",
    )
    asked.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="most host memory for what is offloaded, such as 64GiB (default: no limit); without "
        "--find it goes with --disk",
    )
    add_streaming_argument(asked)
    add_lever_arguments(
        parser.add_argument_group(
            "with --find: what changes the step itself",
            "With a chunked loss or tiles each size is recorded, which takes longer.",
        )
    )


def refuse_without_find(args: argparse.Namespace) -> None:
    """Refuse options that have an effect with ``--find`` alone, where it is not given.

    Raises:
        ConfigError: one is given.
    """
    given = [
        flag
        for flag, value in (
            ("--global-batch", args.global_batch),
            ("--micro-batches", args.micro_batches),
            ("--host-memory", args.host_memory if args.disk is None else None),
            ("--stream-weights", None if args.stream_weights == OFF else args.stream_weights),
            ("--stream-embeddings", None if args.stream_embeddings == OFF else "on"),
        )
        if value is not None
    ]
    if given := [*given, *given_levers(args)]:
        raise ConfigError(
            f"{', '.join(given)} has no effect without --find: drop it, or give --find "
            "micro-batch.",
            key="setting-without-effect",
        )


def run_from_arguments(args: argparse.Namespace) -> int:
    """Run the command; return 1 if nothing fits.

    Raises:
        PyAOError: an option is bad, or the model cannot be had.
    """
    from hf_pyao.plan.documents.microbatch import MicroBatchReport

    _check_options(args)

    def compute() -> MicroBatchReport:
        with few_collections():
            with importing():
                need_torch()
                import transformers.models.auto.modeling_auto  # noqa: F401
            report: MicroBatchReport = microbatch_report(args, shows_progress=not args.json)
        return report

    report = answered(args, args.model, MicroBatchReport, compute, tells=not args.json)
    tell(report, as_json=args.json, output=args.output)
    return 0 if report.chosen is not None else 1


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is recorded."""
    check_least(args, sequence_length=2, micro_batch=1, global_batch=1, lora=1)
    useless = [name for name in NOT_FOR_FINDING if getattr(args, name) not in (None, False)]
    if useless:
        flags = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise ConfigError(
            f"{flags} has no effect with --find: drop one of them.", key="setting-without-effect"
        )
    levers_of(args)
    resident_blocks_of(args)
    for flag, value, finds in (
        ("--micro-batch", args.micro_batch, ("sequence", "model-size")),
        ("--micro-batches", args.micro_batches, ("micro-batch", "largest-micro-batch")),
        (
            "--sequence-length",
            args.sequence_length,
            ("micro-batch", "largest-micro-batch", "model-size"),
        ),
    ):
        if value is not None and args.find not in finds:
            raise ConfigError(
                f"{flag} is given, which has no effect with --find {args.find}: drop it, or take "
                f"--find {finds[0]}.",
                key="setting-without-effect",
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
            f"--micro-batches is {text!r}; expected whole numbers of samples, such as 2,4,8.",
            key="setting-value",
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
    finds = {"sequence": _longest, "model-size": _deepest}
    if args.find in finds and args.global_batch is not None:
        accumulation_of(args.global_batch, args.micro_batch or 1)
    find = finds.get(args.find, _micro_batch)
    choice, num_recordings = find(args, config, hardware, limit_bytes, shows_progress)
    trained = "" if args.lora is None else f", LoRA of rank {args.lora}{described(args.base)}"
    asked_for = FINDS[args.find]
    levers = levers_of(args)
    changed = f", {levers.describe()}" if levers.describe() else ""
    titles = {"sequence": "Longest sequence", "model-size": "Most layers"}
    what = titles.get(args.find, f"{asked_for.capitalize()} micro-batch")
    return MicroBatchReport(
        title=f"{what}: {spec.name}{trained}{changed} on {hardware.name}, {args.engine}",
        find=asked_for,
        global_batch=None if args.find in finds else args.global_batch or DEFAULT_GLOBAL_BATCH,
        limit_bytes=limit_bytes,
        chosen=choice.chosen,
        verdict=choice.reason,
        setup={
            "model": dataclasses.asdict(spec),
            **training_options(args),
            **levers.settings(),
            "host_memory": args.host_memory,
            "stream_weights": args.stream_weights,
            "stream_embeddings": args.stream_embeddings,
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
    from hf_pyao.tools.estimate.model_specs import check_sequence_length

    length = args.sequence_length or DEFAULT_LENGTH
    check_sequence_length(config, length)
    global_batch = args.global_batch or DEFAULT_GLOBAL_BATCH
    sizes = _sizes_of(args.micro_batches)
    training = _training(args, config, hardware)
    record = _recorder(args, training)
    steps = SizedLevers(
        lambda levers: SizedSteps(lambda size: record(size, length, levers), scales=levers.scales)
    )
    best = _best(args, hardware, training, limit_bytes)
    with _progress(shows_progress, len(sizes or divisors_of(global_batch)), "sizes") as progress:

        def best_at(size: int) -> Any:
            found = best(partial(steps.at, size), is_accumulating=size < global_batch)
            progress.done(f"micro-batch {size}")
            return found

        choice = choose_micro_batch(
            best_at,
            limit_bytes=limit_bytes,
            global_batch=global_batch,
            sequence_length=length,
            find=FINDS[args.find],
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
    from hf_pyao.tools.estimate.model_specs import most_positions

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
    with _progress(shows_progress, None, "lengths") as progress:

        def best_at(length: int) -> Any:
            at_length = partial(steps.at, length // LENGTH_STEP)
            found = best(at_length, is_accumulating=is_accumulating)
            progress.done(f"{length} tokens")
            return found

        choice = longest_sequence(
            best_at, limit_bytes=limit_bytes, micro_batch=micro_batch, most_length=most
        )
    return choice, steps.num_recordings


def _deepest(
    args: argparse.Namespace,
    config: Any,
    hardware: Hardware,
    limit_bytes: int,
    shows_progress: bool,
) -> tuple[Any, int]:
    """Return the choice of a number of layers, and how many steps were recorded."""
    from hf_pyao.plan.micro_batch.choice import largest_model
    from hf_pyao.plan.micro_batch.sized_steps import SizedLevers, SizedSteps
    from hf_pyao.tools.estimate.model_specs import (
        check_sequence_length,
        num_parameters_of,
        with_layers,
    )

    length, micro_batch = args.sequence_length or DEFAULT_LENGTH, args.micro_batch or 1
    check_sequence_length(config, length)
    is_accumulating = args.global_batch is None or args.global_batch > micro_batch
    num_recordings = 0
    with _progress(shows_progress, None, "depths") as progress:

        def best_at(layers: int) -> Any:
            nonlocal num_recordings
            training = _training(args, with_layers(config, layers), hardware)
            record = _recorder(args, training)
            steps = SizedLevers(
                lambda levers: SizedSteps(lambda size: record(size, length, levers), scales=False)
            )
            best = _best(args, hardware, training, limit_bytes)
            found = best(partial(steps.at, micro_batch), is_accumulating=is_accumulating)
            num_recordings += steps.num_recordings
            progress.done(f"{layers} layers")
            return found

        choice = largest_model(
            best_at,
            limit_bytes=limit_bytes,
            micro_batch=micro_batch,
            sequence_length=length,
            num_parameters=lambda layers: num_parameters_of(with_layers(config, layers)),
        )
    return choice, num_recordings


def _progress(is_shown: bool, total: int | None, unit: str) -> Progress:
    return Progress("looking for plans", total, unit, is_shown=is_shown)


def _training(args: argparse.Namespace, config: Any, hardware: Hardware) -> FakeTraining:
    """Return the model, as the options train it."""
    from hf_pyao.tools.estimate.fake_step import FakeTraining
    from hf_pyao.tools.simulation.kept_models import KeptModels

    return FakeTraining(config=config, kept=KeptModels(), **training_fields_of(args, hardware))


def _recorder(
    args: argparse.Namespace, training: FakeTraining
) -> Callable[[int, int, Levers], Any]:
    """Return what records the step at a micro-batch and a length, with certain levers."""
    from hf_pyao.tools.estimate.fake_step import runs_without_values
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
        with runs_without_values(training.config.model_type):
            return record_step(training, micro_batch, length, levers=levers)

    return record


def _best(
    args: argparse.Namespace, hardware: Hardware, training: FakeTraining, limit_bytes: int
) -> Callable[..., Any]:
    """Return what finds the best plan for a step."""
    from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
    from hf_pyao.plan.micro_batch.sized_steps import gradients_held, sized_plan
    from hf_pyao.plan.options.plan_request import PlanRequest
    from hf_pyao.plan.predict.predict import operation_times_ms
    from hf_pyao.plan.predict.speed_range import MEASURED
    from hf_pyao.plan.weights.choice import choose_streaming
    from hf_pyao.settings.sizes import Size

    host_bytes = float("inf")
    if args.host_memory is not None:
        host_bytes = float(Size().check("--host-memory", args.host_memory))
    request = PlanRequest.of_config(
        lever_config_of(args),
        host_limit_bytes=host_bytes,
        allocator=AllocatorSettings.parse(args.alloc_conf),
    )
    request = dataclasses.replace(request, ends_on_host=ends_on_host_of(args))
    device, stream_weights = hardware.device, resident_blocks_of(args)

    def best(step_with: Callable[[Levers], Any], *, is_accumulating: bool) -> Any:
        holds = is_accumulating and ENGINES[args.engine] == "device"

        def record(levers: Levers) -> Any:
            return gradients_held(step_with(levers)) if holds else step_with(levers)

        program = record(request.levers)
        times_ms = operation_times_ms(program, device)
        # `auto` plans after it has measured: these are the speeds that it finds.
        planner = request.planner_of(program, times_ms, hardware.link, {}, speed_ratios=MEASURED)
        choice = request.choice(planner, record, device=device)
        if stream_weights == OFF:
            chosen = choice.best(limit_bytes)
        else:
            chosen = choose_streaming(choice, stream_weights, limit_bytes).levers
        found = sized_plan(chosen, request.levers, limit_bytes)
        later_bytes = training.optimizer_step_bytes(step_with(request.levers))
        later_bytes -= chosen.planner.program.streamed.saved_bytes
        later_bytes -= program.resident_bytes - planner.program.resident_bytes
        if later_bytes <= found.peak_bytes:
            return found
        fits = found.fits and later_bytes <= limit_bytes
        return dataclasses.replace(found, peak_bytes=later_bytes, fits=fits)

    return best
