"""Steps, planners and judges for ``judge_plans.py``."""

from __future__ import annotations

import dataclasses
from functools import cache

from hf_pyao.levers import NO_LEVERS, Levers, or_refuse
from hf_pyao.plan.documents.plan import OFFLOAD, RECOMPUTE, Plan
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.options.auto_plan import plan_of
from hf_pyao.plan.options.chosen_levers import LeverRoom
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import Candidate, Planner
from hf_pyao.plan.solve.steering import MEASURED, PRESET
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.replayed_step import replay_step
from tests.helpers.simulation.simulated_step import SimulatedStep

SIZES = {"opt": "1.3b", "gpt2": "0.8b", "llama": "1.2b"}
WINDOW_BYTES = 256 * 2**20
MIN_BYTES = 65536


@cache
def training_of(model: str) -> FakeTraining:
    """Return the paper's model in bfloat16, under ZeRO-2 with its optimizer on the host."""
    return FakeTraining(config=build_config(model, find_size(model, SIZES[model])))


@cache
def program_of(model: str, micro_batch: int, length: int) -> StepProgram:
    """Return its recorded step."""
    return record_step(training_of(model), micro_batch, length)


def planner_of(
    model: str,
    micro_batch: int,
    length: int,
    card: str,
    link: LinkModel,
    gradient_bytes: int = 0,
    *,
    is_measured: bool = False,
) -> Planner:
    """Return the planner of a step, at speeds from a data sheet or as if they were measured."""
    program = program_of(model, micro_batch, length)
    conditions = Conditions(
        link=link,
        window_bytes=WINDOW_BYTES,
        gradient_bytes=gradient_bytes,
        speed_ratios=MEASURED if is_measured else PRESET,
    )
    return Planner(program, operation_times_ms(program, find_hardware(card).device), conditions)


def choice_of(
    planner: Planner, model: str, micro_batch: int, length: int, card: str
) -> LeverChoice:
    """Return what chooses among segments for the step of *planner*."""
    conditions, device = planner.conditions, find_hardware(card).device

    def planner_with(levers: Levers) -> Planner:
        program = program_with(model, micro_batch, length, levers)
        kept = levers.kept_layers(program.num_layers, conditions.keep_last_layers)
        return Planner(
            program,
            operation_times_ms(program, device),
            dataclasses.replace(conditions, keep_last_layers=kept),
        )

    room = LeverRoom(segments=True, nested=True, attention=True)
    return LeverChoice(NO_LEVERS, planner, planner_with, room)


@cache
def program_with(model: str, micro_batch: int, length: int, levers: Levers) -> StepProgram:
    """Return the recorded step of a model with *levers*."""
    training = training_of(model)
    return or_refuse(
        lambda: record_step(training, micro_batch, length, levers=levers, is_other=True)
    )


def replayed(candidate: Candidate, link: LinkModel, gradient_bytes: int = 0) -> SimulatedStep:
    """Replay a plan."""
    step = candidate.step
    return replay_step(
        step.program,
        step.leaves,
        times_ms=step.times_ms,
        link=link,
        window_bytes=candidate.window_bytes,
        rebuilds=step.rebuilds,
        gradient_bytes=gradient_bytes,
    )


def by_engine(
    planner: Planner,
    chosen: Candidate,
    model: str,
    micro_batch: int,
    length: int,
    card: str,
    gradient_bytes: int = 0,
) -> SimulatedStep:
    """Record the plan with the engine on fake tensors, and replay that."""
    plan = plan_of(planner, chosen)
    program = record_step(training_of(model), micro_batch, length, plan=plan, is_whole=True)
    return replay_step(
        program,
        leaves_of(plan, program, chosen.keep_last_layers),
        times_ms=operation_times_ms(program, find_hardware(card).device),
        link=planner.conditions.link,
        window_bytes=chosen.window_bytes,
        gradient_bytes=gradient_bytes,
    )


def leaves_of(plan: Plan, program: StepProgram, keep_last_layers: int) -> list[bool]:
    """Return which slots of a program that was recorded with *plan* leave."""
    planned = {
        (slot.name, layer): slot
        for slot in plan.slots
        for layer in (slot.layers if slot.layers is not None else range(program.num_layers))
    }
    found = []
    for slot in program.slots:
        entry = planned.get((slot.name, slot.layer))
        if entry is None:
            is_kept = slot.layer >= program.num_layers - keep_last_layers
            leaves = plan.otherwise == OFFLOAD and slot.stays is None and not is_kept
        else:
            action = entry.otherwise if entry.action == RECOMPUTE else entry.action
            leaves = action == OFFLOAD
        found.append(leaves and slot.nbytes >= MIN_BYTES)
    return found


def link_of(card: str, gb_per_s: float, copy_engines: int) -> LinkModel:
    """Return a link."""
    speed = gb_per_s * 1e9 / GIB
    return dataclasses.replace(
        find_hardware(card).link,
        d2h_gib_per_s=speed,
        h2d_gib_per_s=speed,
        copy_engines=copy_engines,
    )
