"""Plans for speeds that are not known exactly: the least worst case, never slower than plain ways."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
import transformers

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.predict.speed_range import (
    HALF_A_LINK,
    MEASURED,
    NEVER_SLOWER,
    OFF_BY_30_PERCENT,
    PRESET,
    SAME_REGRET,
    steadiest,
    worst_regret,
)
from hf_pyao.plan.solve import planner as planner_module
from hf_pyao.plan.solve.planner import (
    COSTLY,
    FIRST_CHECKPOINTED,
    FIRST_OFFLOADED,
    KEEP_ALL,
    Candidate,
    NoPlanFitsError,
    Planner,
)
from hf_pyao.plan.solve.step_problem import Conditions
from hf_pyao.plan.step.prediction import Rebuild
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.recorded_step import record_step

OFF = (0.7, 1.0, 1.3)
CARD = find_hardware("rtx4070").with_link(8.0)


def planner_of(config: transformers.PretrainedConfig, **conditions: object) -> Planner:
    program = record_step(FakeTraining(config=config), 2, 256)
    given = Conditions(link=CARD.link, window_bytes=2**24, **conditions)  # type: ignore[arg-type]
    return Planner(program, operation_times_ms(program, CARD.device), given)


def small_opt(num_layers: int = 5) -> transformers.PretrainedConfig:
    return transformers.OPTConfig(
        hidden_size=512,
        ffn_dim=2048,
        word_embed_proj_dim=512,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        vocab_size=2048,
    )


def wide_mistral() -> transformers.PretrainedConfig:
    return transformers.MistralConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=7,
        num_attention_heads=12,
        num_key_value_heads=3,
        vocab_size=2048,
        sliding_window=None,
    )


def ms(candidate: Candidate, link: float, compute: float) -> float:
    """Return what a step takes at other speeds, by a prediction with all times changed."""
    step = candidate.step
    return predict(
        step.program,
        step.leaves,
        window_bytes=candidate.window_bytes,
        times_ms=[each / compute for each in step.times_ms],
        link=CARD.with_link(8.0 * link).link,
        rebuilds={
            number: Rebuild(
                tuple(
                    again._replace(elapsed_ms=again.elapsed_ms / compute)
                    for again in each.operations
                )
            )
            for number, each in step.rebuilds.items()
        },
    ).step_ms


def plain_ways(planner: Planner, limit_bytes: float) -> list[Candidate]:
    """Return what fits of: simple plans, and each number of first layers by itself."""
    firsts = [
        planner.of_first_layers(name, number)
        for name in (FIRST_CHECKPOINTED, FIRST_OFFLOADED)
        for number in range(1, planner.num_open_layers + 1)
    ]
    every = [*planner.simple().values(), *firsts]
    return [each for each in every if each is not None and each.peak_bytes <= limit_bytes]


@pytest.mark.parametrize(
    "config",
    [small_opt(3), small_opt(), wide_mistral()],
    ids=lambda config: f"{config.model_type}-{config.num_hidden_layers}",
)
@pytest.mark.parametrize("share", [0.1, 0.45, 0.8])
@pytest.mark.sampled(every=1000)
def test_a_presets_plan_loses_to_no_plain_way(
    config: transformers.PretrainedConfig, share: float
) -> None:
    planner = planner_of(config)
    peaks = [each.peak_bytes for each in planner.simple().values()]
    limit = min(peaks) + share * (max(peaks) - min(peaks))
    chosen = planner.best(limit)
    assert chosen.peak_bytes <= limit
    for link, compute in itertools.product((0.5, *OFF), OFF):
        best = min(ms(each, link, compute) for each in plain_ways(planner, limit))
        assert ms(chosen, link, compute) <= (1 + NEVER_SLOWER + 1e-3) * best, (link, compute)


@pytest.mark.parametrize("num_layers", [3, 5])
@pytest.mark.sampled(every=2)
def test_measured_speeds_give_the_fastest_plan(num_layers: int) -> None:
    config = small_opt(num_layers)
    measured, preset = (planner_of(config, speed_ratios=each) for each in (MEASURED, PRESET))
    peaks = [each.peak_bytes for each in measured.simple().values()]
    limit = min(peaks) + 0.3 * (max(peaks) - min(peaks))
    fastest = measured.best(limit)
    known = [each for each in measured.all_known() if each.peak_bytes <= limit]
    assert fastest.step_ms <= min(each.step_ms for each in known) * (1 + 1e-6)
    assert preset.best(limit).step_ms <= 1.1 * fastest.step_ms


def test_only_the_ratio_of_the_speeds_matters() -> None:
    planner = planner_of(small_opt())
    for candidate in planner.simple().values():
        for link, compute in ((0.7, 1.3), (1.3, 0.7), (0.7, 0.7)):
            assert ms(candidate, link, compute) * compute == pytest.approx(
                planner.step_ms_at(candidate, link / compute), rel=1e-9
            )


def test_as_few_first_layers_as_fit() -> None:
    planner = planner_of(wide_mistral())
    peaks = [each.peak_bytes for each in planner.simple().values()]
    limit = min(peaks) + 0.5 * (max(peaks) - min(peaks))
    for found in planner.first_layers_fitting(limit):
        fitting = [
            number
            for number in range(1, planner.num_open_layers)
            if (each := planner.of_first_layers(found.name, number)) is not None
            and each.peak_bytes <= limit
        ]
        assert found is planner.of_first_layers(found.name, min(fitting))
    assert len(planner.first_layers_fitting(limit)) == 2


def test_what_cannot_recompute_or_offload_has_no_such_plans() -> None:
    planner = planner_of(small_opt(), may_recompute=False, may_offload=False)
    assert planner.first_layers_fitting(1.0) == []
    with pytest.raises(NoPlanFitsError):
        planner.best(1.0)


def test_the_least_worst_case_is_what_brute_force_finds() -> None:
    random = Random(0)
    for _ in range(300):
        times = {
            name: {ratio: 1 + random.random() * random.choice([0.01, 0.5]) for ratio in PRESET}
            for name in "abcdefg"
        }

        def at(name: str, ratio: float, times: dict[str, dict[float, float]] = times) -> float:
            return times[name][ratio]

        plain = ["a", "b"]
        chosen = steadiest(
            list(times), [[(plain, PRESET)]], PRESET, at, lambda name: (at(name, 1.0),)
        )
        likely = [ratio for ratio in PRESET if ratio != HALF_A_LINK]
        # The rules by themselves, over all names.
        regrets = {
            name: max(at(name, r) / min(at(other, r) for other in times) for r in likely) - 1
            for name in times
        }
        safe = [
            name
            for name in times
            if all(at(name, r) <= (1 + NEVER_SLOWER) * min(at("a", r), at("b", r)) for r in PRESET)
        ] or list(times)
        least = min(regrets[name] for name in safe)
        assert chosen in safe
        assert regrets[chosen] <= least + SAME_REGRET + 1e-12
        assert worst_regret(chosen, times, likely, at) == pytest.approx(regrets[chosen])


def test_links_between_are_tried_where_every_plan_loses_somewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Plans by name, with their times at the slowest, the given and the fastest likely ratio. The
    # plain ways take 100, 100, 90; "slow" loses 6 % at the fast end, "given" 8 % at the slow one.
    slow, fast = OFF_BY_30_PERCENT
    where = (slow, 1.0, fast)
    first_between = math.sqrt(slow)
    times = {
        "plain": (100, 100, 100),
        "fast plain": (150, 105, 90),
        "given": (108, 88, 88),
        "slow": (96, 96, 95.4),
        "middle": (97, 93, 93),  # still loses 3.3 % at the fast end
        "best": (101, 91, 91.5),
    }
    asked = []

    def made(ratio: float, limit_bytes: float, ways: list[str]) -> str:
        asked.append(ratio)
        return "middle" if ratio == first_between else "best"

    planner: Any = planner_of(small_opt(3), speed_ratios=(slow, 1.0, fast))
    monkeypatch.setattr(planner, "step_ms_at", lambda name, r: times[name][where.index(r)])
    monkeypatch.setattr(planner, "_best_at", made)
    monkeypatch.setattr(planner_module, "_rank", lambda name: (times[name][1],))
    found = ["plain", "fast plain", "given", "slow"]
    chosen = planner._steadiest([*found], ["plain", "fast plain"], [], 1.0)
    assert chosen == "best"
    assert asked == [first_between, math.sqrt(first_between)], "between that and the given one"
    asked.clear()
    assert planner._steadiest([*found, "best"], ["plain", "fast plain"], [], 1.0) == "best"
    assert not asked, "it loses nowhere, so that nothing else is tried"
    times["middle"] = (104, 91, 91)  # loses at the slow end instead
    planner._steadiest([*found], ["plain", "fast plain"], [], 1.0)
    assert asked == [first_between, math.sqrt(slow * first_between)]


def test_what_loses_nowhere_within_30_percent_comes_before_what_is_nearest_to_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {  # at the ratios of PRESET; half a link, where all but "first" lose, is the first
        "whole": (110, 110, 110, 110),
        "first": (100, 100, 100, 100),
        "near": (130, 103, 84, 84),
        "steady": (130, 101, 90, 90),
        "given": (200, 200, 80, 80),
    }
    planner: Any = planner_of(small_opt(3))
    monkeypatch.setattr(planner, "step_ms_at", lambda name, r: times[name][PRESET.index(r)])
    monkeypatch.setattr(planner_module, "_rank", lambda name: (times[name][2],))
    found = list(times)[2:]
    assert planner._steadiest(found, ["whole"], ["first"], 1.0) == "steady"


def test_plans_for_speeds_that_were_measured_look_at_a_slower_link_where_they_are_costly() -> None:
    planner = planner_of(small_opt(8), speed_ratios=MEASURED)
    simple = planner.simple()
    least = min(each.peak_bytes for each in simple.values())
    kept = simple[KEEP_ALL]
    planner.best(kept.peak_bytes)
    assert not planner._elsewhere, "everything fits"
    chosen = planner.best(least)
    assert chosen.step_ms > COSTLY * kept.step_ms
    assert list(planner._elsewhere) == [OFF_BY_30_PERCENT[0]]
    alone = min(planner._found(least)[0], key=lambda each: each.step_ms)
    assert chosen.step_ms <= alone.step_ms
    assert chosen.timed.step_ms == planner.again(chosen).timed.step_ms, "at the given speeds"


def test_a_plan_made_for_another_link_fits_over_the_given_one() -> None:
    """What is reserved depends on when copies are done, so that the link counts."""
    planner = planner_of(small_opt(5), allocator=AllocatorSettings())
    simple = planner.simple()
    limit = max(each.memory.needed_bytes for each in simple.values()) * 0.8
    for candidate in planner.best_elsewhere(limit):
        assert candidate.memory.fits(limit)
        assert candidate.step_ms == planner.step_ms_at(candidate, 1.0)
    assert planner.best_elsewhere(1.0) == []
