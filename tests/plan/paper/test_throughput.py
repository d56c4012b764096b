"""PyAO's rule: throughput of the parts of a layer, and which of them are outliers."""

from __future__ import annotations

import math

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.measure.activation_throughput import by_pack_intervals
from hf_pyao.plan.paper.iqr import find_outliers
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step

PAPERS_MICRO_BATCHES = {"opt": 4, "gpt2": 3, "llama": 2}
FLAGGED = {
    "opt": ("fc2",),
    "gpt2": ("mlp.c_proj",),
    "llama": ("mlp.act_fn", "mlp", "mlp.down_proj"),
}
"""By the paper's timing."""


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", FLAGGED)
def test_what_is_flagged_on_the_papers_card(architecture: str) -> None:
    config = build_config(architecture, find_size(architecture, PAPER_SIZES[architecture]))
    program = record_step(FakeTraining(config=config), PAPERS_MICRO_BATCHES[architecture], 512)
    card = find_hardware("rtx4070")
    rates = by_pack_intervals(program, card.device)
    flagged = find_outliers(rates, card.link.d2h_gib_per_s).flagged
    assert set(flagged) == set(FLAGGED[architecture])


UNIFORM = {f"part{number}": 10.0 + 0.1 * number for number in range(8)}


def test_a_uniform_profile_flags_nothing() -> None:
    assert find_outliers(UNIFORM, 1.0).flagged == ()
    assert find_outliers({"one": 5.0}, 1.0).flagged == ()
    assert find_outliers({}, 1.0).flagged == ()


def test_an_injected_outlier_is_found_and_both_conditions_are_needed() -> None:
    rates = {**UNIFORM, "odd": 40.0}
    assert find_outliers(rates, 20.0).flagged == ("odd",)
    assert find_outliers(rates, 50.0).flagged == ()  # an outlier that the link carries
    assert find_outliers(UNIFORM, 5.0).flagged == ()  # above the link, and no outlier
    assert find_outliers({**rates, "odder": 90.0}, 20.0).flagged == ("odder", "odd")


def test_bounds_are_the_quartiles_by_hand() -> None:
    outliers = find_outliers(dict(zip("abcde", (1.0, 2.0, 3.0, 4.0, 100.0), strict=True)), 0.0)
    assert outliers.upper_bound_gib_per_s == 4.0 + 1.5 * (4.0 - 2.0)
    assert outliers.flagged == ("e",)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_figures_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="expected 0 or more"):
        find_outliers({**UNIFORM, "part0": bad}, 1.0)
    with pytest.raises(ConfigError, match="the throughput of the link"):
        find_outliers(UNIFORM, bad)
