"""Plans for speeds that are not known exactly: the least worst case, never slower than plain ways."""

from __future__ import annotations

import itertools

import pytest
import transformers

from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import (
    FIRST_CHECKPOINTED,
    FIRST_OFFLOADED,
    Candidate,
    NoPlanFitsError,
    Planner,
)
from hf_pyao.plan.solve.steering import (
    MEASURED,
    NEVER_SLOWER,
    PRESET,
)
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
    for link, compute in itertools.product(OFF, OFF):
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
    steady = preset.best(limit)
    assert fastest.step_ms <= steady.step_ms * (1 + 1e-3)
    assert steady.step_ms <= 1.1 * fastest.step_ms


def test_only_the_ratio_of_the_speeds_matters() -> None:
    planner = planner_of(small_opt())
    for candidate in planner.simple().values():
        for link, compute in ((0.7, 1.3), (1.3, 0.7), (0.7, 0.7)):
            assert ms(candidate, link, compute) * compute == pytest.approx(
                candidate.outcome.step_ms_at(link / compute), rel=1e-9
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
