"""``pyao estimate --find``: chooses a micro-batch, the longest sequence, or the deepest model."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.weights.base_names import described
from hf_pyao.tools.answers import answered
from hf_pyao.tools.estimate.command import DEFAULT_LENGTH
from hf_pyao.tools.estimate.common_arguments import (
    hardware_of,
    refuse_without_effect,
    tell,
    training_fields_of,
    training_options,
)
from hf_pyao.tools.estimate.lever_arguments import (
    OFF,
    binds_of,
    given_levers,
    levers_of,
    resident_blocks_of,
)
from hf_pyao.tools.progress import Progress

if TYPE_CHECKING:
    from hf_pyao.levers import Levers
    from hf_pyao.plan.predictor.predictor import Predictor, SizedPlan
    from hf_pyao.plan.predictor.steps import Steps
    from hf_pyao.plan.step.step_program import StepProgram

DEFAULT_GLOBAL_BATCH = 64

ASSUMPTION = (
    "where gradients are accumulated on the device, they are there from the start of a micro-batch"
)


FINDS = {"micro-batch": "fastest", "largest-micro-batch": "largest"}
"""Value of ``--find`` -> :attr:`~hf_pyao.plan.documents.microbatch.MicroBatchReport.find`, where
these differ."""

NOT_FOR_FINDING = ("lengths", "no_longest_sequence", "processes", "step", "step_method")
"""Options of ``pyao estimate`` that have no effect with ``--find``."""


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
        found: MicroBatchReport = microbatch_report(args, shows_progress=not args.json)
        return found

    report = answered(args, args.model, MicroBatchReport, compute, tells=not args.json)
    tell(report, as_json=args.json, output=args.output)
    return 0 if report.chosen is not None else 1


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be, before anything is recorded."""
    refuse_without_effect(args, NOT_FOR_FINDING, "--find")
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
    from hf_pyao.plan.predictor import choice as choices
    from hf_pyao.tools.estimate import model_specs
    from hf_pyao.tools.estimate.assumptions import assumptions_for
    from hf_pyao.tools.estimate.card_memory import card_memory

    hardware = hardware_of(args)
    kernels = training_fields_of(args, hardware)["kernels"]
    memory = card_memory(hardware, kernels)
    limit_bytes = memory.limit_bytes
    spec = model_specs.parse_model(args.model)
    config = model_specs.config_of(spec)
    micro_batch, length = args.micro_batch or 1, args.sequence_length or DEFAULT_LENGTH
    is_micro_batch = args.find not in ("sequence", "model-size")
    global_batch = args.global_batch
    if is_micro_batch:
        global_batch = global_batch or DEFAULT_GLOBAL_BATCH
    elif global_batch is not None:
        choices.accumulation_of(global_batch, micro_batch)
    if args.find != "sequence":
        model_specs.check_sequence_length(config, length)
    predictor, steps = _predictor(args, config, hardware, global_batch)
    sizes = _sizes_of(args.micro_batches)
    total = len(sizes or choices.divisors_of(global_batch)) if is_micro_batch else None
    with Progress("looking for plans", total, "sizes", is_shown=shows_progress) as progress:

        def best_at(size: int) -> SizedPlan:
            found = predictor.best(size, limit_bytes)
            progress.done(f"{args.find} {size}")
            return found

        if args.find == "sequence":
            choice = choices.longest_sequence(
                best_at,
                limit_bytes=limit_bytes,
                micro_batch=micro_batch,
                most_length=model_specs.most_positions(config),
            )
        elif args.find == "model-size":
            choice = choices.largest_model(
                best_at,
                limit_bytes=limit_bytes,
                micro_batch=micro_batch,
                sequence_length=length,
                num_parameters=lambda layers: model_specs.num_parameters_of(
                    model_specs.with_layers(config, layers)
                ),
            )
        else:
            choice = choices.choose_micro_batch(
                best_at,
                limit_bytes=limit_bytes,
                global_batch=global_batch,
                sequence_length=length,
                find=FINDS[args.find],
                sizes=sizes,
            )
    trained = "" if args.lora is None else f", LoRA of rank {args.lora}{described(args.base)}"
    asked_for = FINDS.get(args.find, args.find)
    levers = levers_of(args)
    changed = f", {levers.describe()}" if levers.describe() else ""
    titles = {"sequence": "Longest sequence", "model-size": "Most layers"}
    what = titles.get(args.find, f"{asked_for.capitalize()} micro-batch")
    return MicroBatchReport(
        title=f"{what}: {spec.name}{trained}{changed} on {hardware.name}, {args.engine}",
        find=asked_for,
        global_batch=global_batch if is_micro_batch else None,
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
            "num_recorded_steps": steps.num_recordings,
        },
        hardware=dataclasses.asdict(hardware),
        assumptions=[*assumptions_for(kernels), ASSUMPTION, str(memory)],
        provenance=collect_provenance(),
        rows=list(choice.rows),
    )


def _predictor(
    args: argparse.Namespace, config: Any, hardware: Hardware, global_batch: int | None
) -> tuple[Predictor, Steps]:
    """Return what predicts the model as the options train it, by the size that is looked for."""
    from hf_pyao.plan.predictor.choice import LENGTH_STEP
    from hf_pyao.plan.predictor.predictor import Card, Predictor
    from hf_pyao.plan.predictor.steps import Steps, gradients_held
    from hf_pyao.tools.estimate.fake_step import FakeTraining
    from hf_pyao.tools.estimate.model_specs import most_positions, with_layers
    from hf_pyao.tools.estimate.recorded_step import record_with
    from hf_pyao.tools.simulation.kept_models import KeptModels

    binds = binds_of(args)
    micro_batch, length = args.micro_batch or 1, args.sequence_length or DEFAULT_LENGTH
    fields = training_fields_of(args, hardware)

    @functools.lru_cache(maxsize=1)
    def training_of(num_layers: int | None) -> FakeTraining:
        sized = config if num_layers is None else with_layers(config, num_layers)
        return FakeTraining(config=sized, kept=KeptModels(), **fields)

    def record(size: int, levers: Levers) -> StepProgram:
        shape = {"sequence": (micro_batch, size), "model-size": (micro_batch, length)}
        training = training_of(size if args.find == "model-size" else None)
        return record_with(training, binds.levers)(*shape.get(args.find, (size, length)), levers)

    points: tuple[int, ...] | None = (2, 3)
    if args.find == "sequence":
        points = (LENGTH_STEP, 2 * LENGTH_STEP, 3 * LENGTH_STEP)
        if (most_positions(config) or points[-1]) < points[-1]:
            points = None
    elif args.find == "model-size":
        points = None
    steps = Steps(record, points)

    def step_at(size: int, levers: Levers) -> StepProgram:
        program = steps.at(size, levers)
        samples = micro_batch if args.find in ("sequence", "model-size") else size
        is_accumulating = global_batch is None or samples < global_batch
        holds = is_accumulating and args.engine == "plain"
        return gradients_held(program) if holds else program

    return Predictor(step_at, Card.of(hardware.device, hardware.link), binds), steps
