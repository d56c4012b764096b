"""A sweep over budgets by the predictor: one recorded step, and no model that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hf_pyao.config import PyAOConfig
from hf_pyao.levers import Levers
from hf_pyao.plan.documents.bench import OK, OUT_OF_MEMORY
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.plan.documents.sweep import TENSORS, SweepPoint, SweepReport
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.paper.sweep import Budgets, with_points
from hf_pyao.plan.policies.budget import OffloadBudget
from hf_pyao.plan.predictor.predictor import Card, Predictor
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.assumptions import ASSUMPTIONS
from hf_pyao.tools.estimate.card_memory import card_memory
from hf_pyao.tools.estimate.common_arguments import training_fields
from hf_pyao.tools.estimate.fake_step import FakeTraining, runs_without_values
from hf_pyao.tools.estimate.model_specs import ModelSpec, check_sequence_length, config_of
from hf_pyao.tools.estimate.recorded_step import record_step

PEAK = "predicted peak of device memory, on any link, with a host that is far ahead of the device"


def predict_sweep(
    model: ModelSpec,
    hardware: Hardware,
    budgets: Budgets,
    *,
    micro_batch: int,
    sequence_length: int,
    dtype: str = "bfloat16",
    checkpointing: bool = False,
    settings: PyAOConfig | None = None,
    engine: str = "plain",
    optimizer: str = "adamw",
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> SweepReport:
    """Predict a sweep.

    Args:
        model: from :func:`~hf_pyao.tools.estimate.model_specs.parse_model`.
        hardware: the card.
        budgets: what may leave the device in each forward.
        micro_batch: samples of a step.
        sequence_length: tokens of each.
        dtype: of weights and arithmetic; the card's speeds are taken to be for it.
        checkpointing: each layer is recomputed from its input, and the budget goes over inputs.
        settings: ``min_bytes``, ``keep_last_layers``, ``window`` and what changes the step itself
            (:class:`~hf_pyao.levers.Levers`) are followed.
        engine: a key of :data:`~hf_pyao.tools.estimate.command.ENGINES`.
        optimizer: a key of :data:`~hf_pyao.tools.estimate.command.OPTIMIZER_BYTES`.
        on_point: told of each budget.

    Raises:
        ConfigError: the model is unknown, or cannot be run on fake tensors, or has no positions
            for so long a sequence.
    """
    settings = settings or PyAOConfig()
    effective = settings.effective()
    config = config_of(model)
    check_sequence_length(config, sequence_length)
    training = FakeTraining(
        config=config,
        checkpointing=checkpointing,
        dtype=dtype,
        **training_fields(hardware, engine=engine, optimizer=optimizer),
    )
    program = _record(training, micro_batch, sequence_length, Levers.of(effective))
    points = predict_points(
        program,
        budgets,
        hardware,
        tokens=micro_batch * sequence_length,
        settings=settings,
        on_point=on_point,
    )
    first, *others = ASSUMPTIONS
    what = "checkpointing, " if checkpointing else ""
    report = SweepReport(
        title=f"{model.name} predicted on {hardware.name}, micro-batch {micro_batch} x "
        f"{sequence_length} tokens, {dtype}, {what}budgets in {budgets.are}",
        is_measured=False,
        budgets_are=budgets.are,
        memory_is=PEAK,
        setup={
            "model": dataclasses.asdict(model),
            "micro_batch": micro_batch,
            "sequence_length": sequence_length,
            "dtype": dtype,
            "checkpointing": checkpointing,
            "engine": engine,
            "optimizer": optimizer,
            **Levers.of(effective).settings(),
            "min_bytes": effective.min_bytes,
            "keep_last_layers": effective.keep_last_layers,
            "window": effective.window,
            "budgets": list(budgets.values),
        },
        device=dataclasses.asdict(hardware),
        assumptions=[
            first.replace("bfloat16", dtype),
            *others,
            "pack hooks take no time of the host",
        ],
        num_planned=len(points),
        rows=[],
        points=[],
        drift=[],
        knee_reason="",
        provenance=collect_provenance(),
    )
    return with_points(report, points)


def _record(
    training: FakeTraining, micro_batch: int, sequence_length: int, levers: Levers
) -> StepProgram:
    """Record the step that all budgets share.

    Raises:
        ConfigError: the model cannot be run on fake tensors.
    """
    with runs_without_values(training.config.model_type):
        return record_step(training, micro_batch, sequence_length, levers=levers)


def predict_points(
    program: StepProgram,
    budgets: Budgets,
    hardware: Hardware,
    *,
    tokens: int,
    settings: PyAOConfig,
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> list[SweepPoint]:
    """Predict each budget.

    Args:
        program: the step.
        budgets: what may leave.
        hardware: speeds, and the memory that a budget has to fit.
        tokens: of a step.
        settings: ``min_bytes``, ``keep_last_layers`` and ``window`` of it are followed.
        on_point: told of each.
    """
    binds = PlanRequest.of_config(settings, allocator=AllocatorSettings())
    predictor = Predictor(lambda *_: program, Card.of(hardware.device, hardware.link), binds)
    points = []
    for position, budget in enumerate(budgets.values):
        point = _predict(predictor, budgets, budget, hardware, tokens, position)
        points.append(point)
        on_point(point)
    return points


def _predict(
    predictor: Predictor,
    budgets: Budgets,
    budget: int,
    hardware: Hardware,
    tokens: int,
    position: int,
) -> SweepPoint:
    is_count = budgets.are == TENSORS
    policy = OffloadBudget(
        predictor.binds.min_bytes,
        max_tensors=budget if is_count else None,
        max_bytes=None if is_count else budget,
    )
    found = predictor.at(1, Way(f"a budget of {budget}", policy))
    timed, memory = found.timed, found.memory
    limit_bytes = card_memory(hardware).limit_bytes
    fits = memory.fits(limit_bytes)
    reserved_bytes = memory.reserved_within(limit_bytes)
    return SweepPoint(
        budget=budget,
        position=position,
        status=OK if fits else OUT_OF_MEMORY,
        reason=""
        if fits
        else f"the allocator may reserve {reserved_bytes / GIB:.2f} GiB, and "
        f"{limit_bytes / GIB:.2f} GiB of {hardware.name} can be used",
        memory_bytes=found.peak_bytes,
        host_bytes=timed.host_peak_bytes,
        offloaded_bytes=timed.offloaded_bytes,
        step_ms=timed.step_ms,
        tokens_per_s=tokens / timed.step_ms * 1e3,
        stall_ms=found.stall_ms,
    )
