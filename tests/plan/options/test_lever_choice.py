"""The choice among segments and tiles: recorded only where nothing else fits."""

from __future__ import annotations

import dataclasses
import math
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
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.options.plan_levers import GivenLevers, levers_of_plan
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.calibration import times_like
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.predictor.predictor import Card, Predictor
from hf_pyao.plan.solve.planner import NoPlanFitsError, Planner
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
    """Return a step of one forward."""
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
        self,
        plans: list[tuple[float, int, int]],
        host_limit: float,
        step: StepProgram,
        *,
        has_graph: bool = True,
    ) -> None:
        self.plans = [
            SimpleNamespace(
                name=str(n),
                step_ms=ms,
                peak_bytes=peak,
                host_bytes=host,
                rank=lambda r=(ms, peak): r,
            )
            for n, (ms, peak, host) in enumerate(plans)
        ]
        self.host_limit_bytes = host_limit
        self.program = step
        self.stepper = SimpleNamespace(search=object() if has_graph else None)

    def best(self, limit: float) -> Any:
        found = [
            p for p in self.plans if p.peak_bytes <= limit and p.host_bytes <= self.host_limit_bytes
        ]
        if not found:
            raise NoPlanFitsError("nothing fits", self.least().peak_bytes)
        return min(found, key=lambda p: p.rank())

    def least(self) -> Any:
        within = [p for p in self.plans if p.host_bytes <= self.host_limit_bytes]
        return min(within, key=lambda p: p.peak_bytes)

    @property
    def kept(self) -> Any:
        return self.plans[0]


def choice_of(table: Mapping[Levers, Plans], room: LeverRoom = FREE) -> tuple[LeverChoice, list]:
    recorded: list[Levers] = []

    def planner_with(levers: Levers) -> Planner:
        recorded.append(levers)
        return cast(Planner, table[levers])

    given = next(iter(table))
    return LeverChoice(given, cast(Planner, table[given]), planner_with, room), recorded


def again(length: int, *, save: bool = False) -> Levers:
    return Levers(checkpoint_every=length, save_attention=save)


SETTINGS_OF_SEGMENTS = {
    Levers(): [(100.0, 900, 0), (140.0, 500, 90)],
    again(1, save=True): [(118.0, 700, 0), (119.0, 450, 80)],
    again(1): [(125.0, 600, 0), (126.0, 300, 60)],
    again(2): [(128.0, 450, 0), (129.0, 320, 30)],
    again(4): [(131.0, 400, 0), (132.0, 340, 15)],
    again(8): [(133.0, 390, 0), (134.0, 360, 8)],
}


@pytest.mark.parametrize(
    ("limit", "host_limit", "num_recorded", "chosen"),
    [
        (900, math.inf, 0, Levers()),  # everything is kept
        (500, math.inf, 0, Levers()),  # others are faster there, and are not needed
        (460, math.inf, 1, again(1, save=True)),
        (320, math.inf, 2, again(1)),
        (430, 40, 3, again(2)),  # the host is too small for segments of one layer
        (345, 20, 4, again(4)),
        (100, math.inf, 5, again(1)),  # nothing fits: the lowest peak
    ],
)
def test_other_settings_are_recorded_until_one_fits(
    limit: int, host_limit: float, num_recorded: int, chosen: Levers
) -> None:
    table = {
        levers: Plans(plans, host_limit, program())
        for levers, plans in SETTINGS_OF_SEGMENTS.items()
    }
    choice, recorded = choice_of(table)
    found = choice.best(limit)
    assert found.levers == chosen
    assert len(recorded) == num_recorded
    assert found.fits == (limit > 100)
    assert [each.levers for each in found.looked_at] == [Levers(), *recorded]


@pytest.mark.parametrize(
    ("has_graph", "ms", "num_recorded"), [(True, 150.0, 0), (False, 150.0, 1), (False, 101.0, 0)]
)
def test_layers_run_again_where_nothing_of_them_can_alone(
    has_graph: bool, ms: float, num_recorded: int
) -> None:
    plans = [(100.0, 900, 0), (ms, 400, 90)]
    table = {
        Levers(): Plans(plans, math.inf, program(), has_graph=has_graph),
        again(1): Plans([(120.0, 350, 0)], math.inf, program(), has_graph=False),
    }
    choice, recorded = choice_of(table, LeverRoom(segments=True))
    assert choice.best(400).levers == (again(1) if num_recorded else Levers())
    assert len(recorded) == num_recorded


def test_segments_that_are_implied_go_where_all_fits_without() -> None:
    table = {
        again(1): Plans([(125.0, 600, 0)], math.inf, program()),
        Levers(): Plans([(100.0, 900, 0)], math.inf, program()),
    }
    for limit, chosen in ((900, Levers()), (700, again(1))):
        choice, recorded = choice_of(table, LeverRoom(segments=True))
        assert choice.best(limit).levers == chosen
        assert recorded == [Levers()]


def test_what_refuses_is_not_chosen_and_said() -> None:
    plans = Plans([(100.0, 900, 0)], math.inf, program())

    def refuse(levers: Levers) -> Planner:
        raise LeversRefusedError("its layers count their calls")

    chosen = LeverChoice(Levers(), cast(Planner, plans), refuse, FREE).best(200)
    assert not chosen.fits and chosen.levers == Levers()
    assert {each.note for each in chosen.looked_at[1:]} == {"its layers count their calls"}


@pytest.mark.parametrize("workspace", [2**20, 3 * 2**30])
def test_groups_are_recorded_where_attention_takes_much(workspace: int) -> None:
    step = program(workspace_bytes=workspace)
    in_groups = Levers(attention_groups="auto")
    table = {
        Levers(): Plans([(100.0, 9, 0)], math.inf, step),
        in_groups: Plans([(101.0, 7, 0)], math.inf, program()),
    }
    choice, recorded = choice_of(table, LeverRoom(groups=True))
    assert choice.best(9).levers == Levers()
    assert not recorded
    found = choice.best(8)
    is_large = workspace > 2**30
    assert recorded == ([in_groups] if is_large else [])
    assert found.fits == is_large
    assert ("attention in groups" in found.reason) == is_large


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
    assert {each.mlp_tiles for each in tiles} == {8, 16, 32, 64, 128, 256, 512, 1024}


@pytest.mark.parametrize(
    ("config", "segments", "attention", "tiles", "groups", "why"),
    [
        (PyAOConfig(), True, True, False, True, ""),
        (PyAOConfig(checkpoint_every=0), False, False, False, True, "checkpoint_every is 0"),
        (PyAOConfig(checkpoint_every=2), False, False, False, True, ""),
        (PyAOConfig(long_context=True), True, True, True, True, ""),
        (PyAOConfig(long_context=True, save_attention=False), True, False, True, True, ""),
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
