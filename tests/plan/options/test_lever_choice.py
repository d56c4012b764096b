"""The choice among segments and tiles: the fastest that fits, recorded only where it may pay."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hf_pyao import PyAOConfig
from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.documents.plan_facts import PlanError
from hf_pyao.plan.options.auto_plan import plan_of_choice
from hf_pyao.plan.options.chosen_levers import ChosenLevers, LeverRoom
from hf_pyao.plan.options.lever_choice import GAIN, WORTH, LeverChoice
from hf_pyao.plan.options.plan_levers import GivenLevers, levers_of_plan
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import times_like
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.predictor.predictor import Card, Predictor
from hf_pyao.plan.solve.planner import KEEP_ALL, OFFLOAD_ALL, NoPlanFitsError, Planner
from hf_pyao.plan.solve.steering import PRESET
from hf_pyao.plan.step.step_program import FORWARD, Operation, Segment, StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.hardware import HARDWARE
from tests.helpers.simulation.fake_peak import peak_of
from tests.helpers.simulation.simulated_step import simulate_step

NUM_LAYERS = 16
FREE = LeverRoom(segments=True, attention=True)
ATTENTION = "_scaled_dot_product_flash_attention"


def program(num_tiles: int = 0, num_tiled_tokens: int = 0, workspace_bytes: int = 0) -> StepProgram:
    """Return a step of one forward: 30 ms outside of attention, and 10 in it."""
    return StepProgram(
        operations=(
            Operation("mm", "", 0.0, 0, True),
            Operation(ATTENTION, "", 0.0, 0, True, workspace_bytes=workspace_bytes),
        ),
        buffers=(),
        slots=(),
        segments=(Segment(FORWARD, 0, 0, 2),),
        resident_bytes=0,
        layer_names=tuple(map(str, range(NUM_LAYERS))),
        num_tiles=num_tiles,
        num_tiled_tokens=num_tiled_tokens,
    )


class Plans:
    """Stands for a planner: knows some plans, each with a time, a peak and host bytes."""

    def __init__(
        self, plans: list[tuple[float, int, int]], host_limit: float, step: StepProgram
    ) -> None:
        self.plans = [
            SimpleNamespace(
                name=str(n),
                step_ms=ms,
                timed=SimpleNamespace(compute_ms=ms),
                peak_bytes=peak,
                host_bytes=host,
            )
            for n, (ms, peak, host) in enumerate(plans)
        ]
        self.host_limit_bytes = host_limit
        self.program = step
        self.stepper = SimpleNamespace(program=step, times_ms=[30.0, 10.0])

    def best(self, limit: float) -> Any:
        found = [
            p for p in self.plans if p.peak_bytes <= limit and p.host_bytes <= self.host_limit_bytes
        ]
        if not found:
            raise NoPlanFitsError("nothing fits", self.least().peak_bytes)
        return min(found, key=lambda p: (p.step_ms, p.peak_bytes))

    def least(self) -> Any:
        within = [p for p in self.plans if p.host_bytes <= self.host_limit_bytes]
        return min(within, key=lambda p: p.peak_bytes)

    @property
    def kept(self) -> Any:
        return self.plans[0]

    def simple(self) -> Any:
        return {KEEP_ALL: self.kept, OFFLOAD_ALL: self.plans[-1]}


def made_up(rng: random.Random, host_limit: float) -> dict[Levers, Plans]:
    """Return planners for all settings, which keep to what the choice takes for granted.

    Longer segments take no less compute and no less of the device where all leaves; the host holds
    in proportion less.
    """
    table: dict[Levers, Plans] = {}
    kept_ms, everything = 100.0, rng.randrange(800, 1000)

    def plans(ms: float, most: int, least: int, host: int) -> Plans:
        """Return keeping all, some between, and offloading all."""
        rows = [(ms, most, 0)]
        for _ in range(3):
            share = rng.random()
            slower = ms * (1 + 0.2 * share * rng.random())
            rows.append((slower, round(most - share * (most - least)), round(share * host)))
        rows.append((ms * (1 + 0.3 * rng.random()), least, host))
        return Plans(rows, host_limit, program())

    table[Levers()] = plans(kept_ms, everything, rng.randrange(200, 700), rng.randrange(300, 900))
    host, least = rng.randrange(50, 200), rng.randrange(100, 400)
    for save in (False, True):
        ms = kept_ms + (15 if save else 20) + rng.random() * 10
        for length in (1, 2, 4, 8):
            kept = least + host // length
            levers = Levers(checkpoint_every=length, save_attention=save)
            table[levers] = plans(ms, kept + 20 * save, least, (host + 40 * save) // length)
            ms += rng.random() * 3
            least += rng.randrange(30)
    return table


def choice_of(table: Mapping[Levers, Plans], room: LeverRoom = FREE) -> tuple[LeverChoice, list]:
    recorded: list[Levers] = []

    def planner_with(levers: Levers) -> Planner:
        recorded.append(levers)
        return cast(Planner, table[levers])

    choice = LeverChoice(Levers(), cast(Planner, table[Levers()]), planner_with, room)
    return choice, recorded


def test_nested_segments_are_bounded_by_those_of_one_layer() -> None:
    """They take no less compute: where one layer costs nothing beyond it, they are not recorded."""
    by_one = [(130.0, 300, 0), (130.0, 100, 50)]
    table = {
        Levers(): Plans([(100.0, 900, 0), (110.0, 700, 50)], math.inf, program()),
        Levers(checkpoint_every=1): Plans(by_one, math.inf, program()),
    }
    choice, recorded = choice_of(table, LeverRoom(segments=True, nested=True))
    chosen = choice.best(500)
    assert recorded == [Levers(checkpoint_every=1)]
    assert chosen.levers == Levers(checkpoint_every=1)
    notes = {each.note for each in chosen.looked_at if each.levers.checkpoint_nested}
    assert notes == {"takes 130 ms or more"}


def test_it_is_the_fastest_that_fits_of_all_settings() -> None:
    """Against trying all: within what a gain must be, and what is good enough."""
    rng = random.Random(0)
    num_changed = num_skipped = 0
    for _ in range(400):
        table = made_up(rng, rng.choice([math.inf, 0.0, rng.randrange(1, 200)]))
        limit = rng.randrange(50, 1100)
        choice, recorded = choice_of(table)
        chosen = choice.best(limit)
        fitting = []
        for plans in table.values():
            try:
                fitting.append(plans.best(limit))
            except NoPlanFitsError:
                continue
        assert chosen.fits == bool(fitting)
        num_changed += chosen.levers != Levers()
        num_skipped += len(table) - 1 - len(recorded)
        if not fitting:
            assert "nothing fits" in chosen.error
            continue
        assert chosen.candidate in fitting
        best_ms = min(each.step_ms for each in fitting)
        kept_ms = table[Levers()].plans[0].step_ms
        assert chosen.candidate.step_ms <= max(GAIN * best_ms, WORTH * kept_ms) + 1e-9
        configured = table[Levers()]
        if configured.least().peak_bytes <= limit and chosen.levers != Levers():
            assert chosen.candidate.step_ms * GAIN < configured.best(limit).step_ms
    assert num_changed > 40 and num_skipped > 1000


def test_what_refuses_is_not_chosen_and_said() -> None:
    plans = Plans([(100.0, 900, 0)], math.inf, program())

    def refuse(levers: Levers) -> Planner:
        raise LeversRefusedError("its layers count their calls")

    chosen = LeverChoice(Levers(), cast(Planner, plans), refuse, FREE).best(200)
    assert not chosen.fits and chosen.levers == Levers()
    assert {each.note for each in chosen.looked_at[1:]} == {"its layers count their calls"}


GROUPS = LeverRoom(groups=True)
GIB = 2**30


@pytest.mark.parametrize(
    ("workspace", "plain", "grouped", "limit", "is_recorded", "chosen"),
    [
        (3 * GIB, (100, 9), (101, 7), 8, True, "auto"),  # nothing else fits
        (3 * GIB, (100, 9), (101, 7), 9, False, "off"),  # everything is kept
        (3 * GIB, (100, 12), (101, 9), 8, False, "off"),  # they cannot win that much
        (3 * GIB, (130, 8), (104, 8), 8, True, "auto"),  # less has to leave
        (3 * GIB, (130, 8), (131, 8), 8, False, "off"),  # what they free gains nothing
        (2**20, (100, 9), (101, 9), 8, False, "off"),  # kernels allocate little inside
    ],
)
def test_groups_are_taken_where_memory_needs_them(
    workspace: int,
    plain: tuple[int, int],
    grouped: tuple[int, int],
    limit: int,
    is_recorded: bool,
    chosen: str,
) -> None:
    def plans(ms: int, peak_gib: int) -> Plans:
        step = program(workspace_bytes=workspace)
        rows = [(100.0, 15 * GIB, 0)] if ms > 100 else []
        if grouped[0] < ms:  # what groups make room for, room makes room for
            rows.append((grouped[0] - 1.0, grouped[1] * GIB + workspace, 0))
        return Plans([*rows, (float(ms), peak_gib * GIB, 0)], math.inf, step)

    in_groups = Levers(attention_groups="auto")
    choice, recorded = choice_of({Levers(): plans(*plain), in_groups: plans(*grouped)}, GROUPS)
    found = choice.best(limit * GIB)
    assert recorded == ([in_groups] if is_recorded else [])
    assert found.levers == Levers(attention_groups=chosen)
    assert ("attention in groups" in found.reason) == (chosen == "auto")


def test_no_setting_but_the_free_ones_is_looked_at() -> None:
    plans = Plans([(100.0, 900, 0)], math.inf, program(num_tiles=4, num_tiled_tokens=2**20))

    def asked(given: Levers, room: LeverRoom) -> set[Levers]:
        found = set()

        def planner_with(levers: Levers) -> Planner:
            found.add(levers)
            return cast(Planner, plans)

        LeverChoice(given, cast(Planner, plans), planner_with, room).best(200)
        return found

    fixed = Levers(mlp_tiles="auto", checkpoint_every=2)
    assert not asked(fixed, LeverRoom())
    segments = asked(Levers(), LeverRoom(segments=True))
    assert {each.mlp_tiles for each in segments} == {"off"}
    assert {each.save_attention for each in segments} == {False}
    alone = asked(Levers(), LeverRoom(segments=True, longest_segment=1))
    assert {each.checkpoint_every for each in alone} == {1}
    tiles = asked(fixed, LeverRoom(tiles=True))
    assert {each.checkpoint_every for each in tiles} == {2}
    assert {each.mlp_tiles for each in tiles} == {1024}  # the most; what it does not fit, none does


@pytest.mark.parametrize(
    ("config", "segments", "attention", "tiles", "groups", "why"),
    [
        (PyAOConfig(), True, True, False, True, ""),
        (PyAOConfig(checkpoint_every=0), False, False, False, True, "checkpoint_every is 0"),
        (PyAOConfig(checkpoint_every=2), False, False, False, True, ""),
        (PyAOConfig(long_context=True), True, True, True, False, ""),
        (PyAOConfig(long_context=True, save_attention=False), True, False, True, False, ""),
        (PyAOConfig(mlp_tiles="auto"), True, True, True, True, ""),
        (PyAOConfig(mlp_tiles=4), True, True, False, True, ""),
        (PyAOConfig(attention_groups="off"), True, True, False, False, ""),
        (PyAOConfig(attention_groups=4), True, True, False, False, ""),
        (
            PyAOConfig(recompute_modules=("mlp",)),
            *(False, False, False, True),
            "recompute_modules is given",
        ),
        (PyAOConfig(policy="all", long_context=True), False, False, False, False, ""),
    ],
)
def test_what_was_given_is_not_free(
    config: PyAOConfig, segments: bool, attention: bool, tiles: bool, groups: bool, why: str
) -> None:
    room = PlanRequest.of_config(config).room
    assert (room.segments, room.attention, room.tiles) == (segments, attention, tiles)
    assert room.groups == groups
    assert room.why_no_segments == why


# ---- plans as documents ------------------------------------------------------------------------


def plan_with(**levers: Any) -> Plan:
    return Plan(slots=[PlannedSlot(name=":0", action="offload")], levers=levers)


def test_a_plan_of_before_is_followed_as_configured() -> None:
    values = plan_with().to_dict()
    for name in ("levers", "levers_reason", "lever_settings"):
        del values[name]
    plan = Plan.from_dict(values)
    config = PyAOConfig(policy="plan", plan="p", checkpoint_every=2)
    assert levers_of_plan(plan, GivenLevers.of(config)) == Levers(checkpoint_every=2)


def test_a_plan_sets_what_was_not_given() -> None:
    plan = Plan.from_dict(plan_with(checkpoint_every=4, save_attention=True, mlp_tiles=8).to_dict())
    config = PyAOConfig(policy="auto", mlp_tiles="auto")
    assert levers_of_plan(plan, GivenLevers.of(config)) == Levers(
        checkpoint_every=4, save_attention=True, mlp_tiles=8
    )
    given = PyAOConfig(
        policy="plan", plan="p", checkpoint_every=4, save_attention=True, mlp_tiles=8
    )
    assert levers_of_plan(plan, GivenLevers.of(given)) == Levers.of(given)


@pytest.mark.parametrize(
    ("levers", "settings", "message"),
    [
        ({"mlp_tiles": 8}, {}, "does not switch tiles on.*Give mlp_tiles='auto' or 8"),
        ({"mlp_tiles": 8}, {"mlp_tiles": 4}, "mlp_tiles is 4. Give mlp_tiles=8"),
        ({"checkpoint_every": 4}, {"checkpoint_every": 0}, "Give checkpoint_every=4"),
        ({"head_loss": "chunked"}, {}, "Give head_loss='chunked'"),
        ({"checkpoint_every": 1}, {"policy": "pyao"}, "checkpoint_every is 0"),
    ],
)
def test_a_plan_that_contradicts_what_was_given_is_refused(
    levers: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        levers_of_plan(plan_with(**levers), GivenLevers.of(PyAOConfig(**settings)))


@pytest.mark.parametrize(
    ("levers", "message"),
    [
        ({"chekpoint_every": 4}, "unknown lever 'chekpoint_every'.*checkpoint_every"),
        ({"checkpoint_every": -1}, "checkpoint_every in the plan's levers is -1"),
        ({"mlp_tiles": "many"}, "mlp_tiles in the plan's levers is 'many'"),
    ],
)
def test_bad_levers_are_refused(levers: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_with(**levers)


# ---- with recorded steps -----------------------------------------------------------------------

MODEL = "llama:hidden_size=64,intermediate_size=256,num_hidden_layers=8,num_attention_heads=4,vocab_size=128"
MICRO_BATCH, LENGTH = 4, 64
SETTINGS = {"min_bytes": 4096, "window": 2**15}


@cache
def training() -> FakeTraining:
    return FakeTraining(config=config_of(parse_model(MODEL)))


@cache
def recorded(levers: Levers) -> StepProgram:
    return record_step(training(), MICRO_BATCH, LENGTH, levers=levers, is_other=True)


def chosen_within(config: PyAOConfig, limit_bytes: float, host_bytes: float) -> ChosenLevers:
    request = PlanRequest.of_config(config, host_limit_bytes=host_bytes)
    card = Card.of(HARDWARE.device, HARDWARE.link, PRESET)
    predictor = Predictor(lambda _, levers: recorded(levers), card, request)
    return predictor.choice().best(limit_bytes).levers


def planner_with(config: PyAOConfig, host_bytes: float = math.inf, **levers: Any) -> Planner:
    request = PlanRequest.of_config(config, host_limit_bytes=host_bytes)
    request = dataclasses.replace(request, levers=dataclasses.replace(request.levers, **levers))
    step = recorded(request.levers)
    return request.planner_of(step, operation_times_ms(step, HARDWARE.device), HARDWARE.link, {})


def assert_it_comes_to_what_it_says(plan: Plan, path: Path, chosen: ChosenLevers) -> None:
    """The real engine follows the plan on fake tensors, and comes to its time and peak."""
    plan.to_json_file(path)
    candidate = chosen.candidate
    settings = PyAOConfig(
        verify_recompute="off",  # fingerprints are no part of a plan
        policy="plan",
        plan=str(path),
        keep_last_layers=candidate.keep_last_layers,
        host_memory_gib=2.0**20,
        **{**SETTINGS, "window": candidate.window_bytes},
    )
    simulated = simulate_step(training(), settings, HARDWARE, MICRO_BATCH, LENGTH)
    assert simulated.offloaded_bytes == candidate.timed.offloaded_bytes
    assert simulated.peak_bytes == candidate.timed.peak_bytes
    assert simulated.step_ms == pytest.approx(candidate.step_ms, rel=1e-6)
    found = peak_of(training(), settings, MICRO_BATCH, LENGTH)
    assert found.peak_bytes == candidate.peak_bytes


def below_slot_by_slot(share: float) -> ChosenLevers:
    """Return the choice within a limit that no plan for the step as configured meets."""
    config = PyAOConfig(**SETTINGS)
    plain = planner_with(config).least().peak_bytes
    least = planner_with(config, checkpoint_every=1).least().peak_bytes
    assert least < plain
    return chosen_within(config, least + share * (plain - 1 - least), math.inf)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_was_chosen_comes_to_its_time_and_peak(share: float, tmp_path: Path) -> None:
    chosen = below_slot_by_slot(share)
    assert_it_comes_to_what_it_says(
        plan_of_choice(chosen, limit_bytes=1e12), tmp_path / "plan.json", chosen
    )


@pytest.mark.thorough
def test_times_of_other_levers_follow_from_those_that_were_measured() -> None:
    """Where all that a device does takes so much longer, running again does too."""
    plain = recorded(Levers())
    again = recorded(Levers(checkpoint_every=1))
    device = HARDWARE.device
    measured_ms = [3.0 * each for each in operation_times_ms(plain, device)]
    found = times_like(measured_ms, plain, again)
    expected = 3.0 * sum(operation_times_ms(again, device))
    assert sum(found) == pytest.approx(expected, rel=0.02)
