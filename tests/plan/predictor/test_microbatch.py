"""The choice of a micro-batch, and of a length: as brute force would choose, with the reasons."""

from __future__ import annotations

import random

import pytest

from hf_pyao.errors import ConfigError
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predictor.choice import (
    FASTEST,
    LARGEST,
    LENGTH_STEP,
    TIE,
    accumulation_of,
    choose_micro_batch,
    divisors_of,
    longest_sequence,
)
from hf_pyao.plan.predictor.predictor import SizedPlan
from hf_pyao.plan.predictor.steps import Steps, gradients_held
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from tests.helpers.simulation.fake_peak import peak_of

LIMIT = 1000


def table_of(rng: random.Random, sizes: list[int]) -> dict[int, SizedPlan]:
    """Return plans with rising peaks, and any times; some of them nearly equal."""
    peak, table = rng.randint(1, 900), {}
    for size in sizes:
        sample_ms = rng.choice([rng.uniform(1, 3), 1.0, 1.0 + TIE / 2, 1.0 + 3 * TIE])
        table[size] = SizedPlan(
            plan="any", step_ms=size * sample_ms, peak_bytes=peak, fits=peak <= LIMIT
        )
        peak += rng.randint(1, 300)
    return table


@pytest.mark.parametrize("find", [FASTEST, LARGEST])
def test_the_choice_is_that_of_brute_force(find: str) -> None:
    rng = random.Random(0)
    num_chosen = 0
    for _ in range(300):
        global_batch = rng.randint(1, 200)
        sizes = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
        assert divisors_of(global_batch) == sizes
        table = table_of(rng, sizes)
        asked: list[int] = []

        def best_at(size: int, table=table, asked=asked) -> SizedPlan:  # type: ignore[no-untyped-def]
            asked.append(size)
            found: SizedPlan = table[size]
            return found

        choice = choose_micro_batch(
            best_at, limit_bytes=LIMIT, global_batch=global_batch, sequence_length=8, find=find
        )
        fitting = [size for size in sizes if table[size].fits]
        assert asked == sizes[: len(fitting) + 1], "nothing is asked above what does not fit"
        assert [row.micro_batch for row in choice.rows] == asked
        if not fitting:
            assert choice.chosen is None
            assert "Nothing fits" in choice.reason
            continue
        num_chosen += 1
        sample_ms = {size: table[size].step_ms / size for size in fitting}
        least_ms = min(sample_ms.values())
        expected = max(fitting)
        if find == FASTEST:
            expected = min(s for s in fitting if sample_ms[s] <= least_ms * (1 + TIE))
        assert choice.chosen is not None
        assert choice.chosen.micro_batch == expected
        assert choice.chosen.accumulation == global_batch // expected
        assert choice.reason.startswith(f"{find.capitalize()}: micro-batch {expected} ")
    assert num_chosen > 100


def test_what_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"micro-batch of 5 does not divide .* of 24.*: 4, 6\."):
        accumulation_of(24, 5)
    with pytest.raises(ConfigError, match=r"nearest that do: 24\."):
        accumulation_of(24, 48)


@pytest.mark.parametrize("most_length", [None, 64, 100, 640, 2048, 8192])
def test_the_longest_sequence_is_that_of_brute_force(most_length: int | None) -> None:
    most = 2**24 // LENGTH_STEP if most_length is None else most_length // LENGTH_STEP
    for limit in (3, 4, 8, 11, 40, 130, 10**9):

        def best_at(length: int, limit: int = limit) -> SizedPlan:
            assert length % LENGTH_STEP == 0
            peak = 3 + length // LENGTH_STEP
            return SizedPlan(plan="a", step_ms=1.0, peak_bytes=peak, fits=peak <= limit)

        choice = longest_sequence(
            best_at, limit_bytes=limit, micro_batch=2, most_length=most_length
        )
        expected = min(most, limit - 3)
        found = 0 if choice.chosen is None else choice.chosen.sequence_length // LENGTH_STEP
        assert found == max(expected, 0)
        assert len(choice.rows) <= 40
        if expected == most and most_length is not None:
            assert f"positions for no more than {most_length:,}" in choice.reason
        elif 0 < expected < most:
            assert f"{(expected + 1) * LENGTH_STEP:,} tokens would take" in choice.reason


def test_a_model_with_no_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 63 positions"):
        longest_sequence(
            lambda length: pytest.fail("no length"), limit_bytes=1, micro_batch=1, most_length=63
        )


# ---- steps at sizes ------------------------------------------------------------------------------


def small_training(**more: object) -> FakeTraining:
    config = build_config("gpt2", find_size("gpt2", "124m"))
    config.n_layer, config.vocab_size, config.n_embd = 3, 4096, 192
    return FakeTraining(config=config, training_state="device", **more)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_other_sizes_follow_from_two_recordings() -> None:
    training = small_training()
    steps = Steps(lambda size, levers: record_step(training, size, 64, levers=levers))
    for size in (1, 5):
        expected = record_step(training, size, 64)
        leaves = [False] * len(expected.slots)
        found = predict(steps.at(size, NO_LEVERS), leaves, window_bytes=None)
        assert found.peak_bytes == predict(expected, leaves, window_bytes=None).peak_bytes
    assert steps.num_recordings == 3  # 1, 2 and 3


@pytest.mark.thorough
def test_steps_that_do_not_scale_are_recorded_each() -> None:
    asked: list[int] = []
    training = small_training()

    def record(size: int, levers: Levers) -> StepProgram:
        asked.append(size)
        return record_step(training, size, 64)

    for points in (None, (2, 3)):
        # A single sample runs other operations than two do, if anything differs at all.
        steps = Steps(record, points)
        asked.clear()
        for size in (4, 5, 4):
            steps.at(size, NO_LEVERS)
        assert asked == ([4, 5] if points is None else [2, 3])


class _Accumulating(FakeTraining):
    """Runs two micro-batches before gradients are let go."""

    def run(self, *args: object, **kwargs: object) -> None:
        """Run both."""
        super().run(*args, **kwargs)  # type: ignore[arg-type]
        super().run(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_gradients_of_the_micro_batch_before_are_counted() -> None:
    """Against a ledger of every tensor while two micro-batches run."""
    from hf_pyao.config import PyAOConfig

    training = small_training()
    twice = _Accumulating(config=training.config, training_state="device")
    settings = PyAOConfig(policy="off", host_memory_gib=1024)
    once_bytes = peak_of(training, settings, 4, 128).peak_bytes
    twice_bytes = peak_of(twice, settings, 4, 128).peak_bytes
    program = record_step(training, 4, 128)
    leaves = [False] * len(program.slots)
    first = predict(program, leaves, window_bytes=None).peak_bytes
    behind = predict(gradients_held(program), leaves, window_bytes=None).peak_bytes
    assert first == pytest.approx(once_bytes, rel=2e-3)
    assert behind == pytest.approx(twice_bytes, rel=2e-3)
    assert twice_bytes > 1.05 * once_bytes
