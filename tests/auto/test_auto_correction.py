"""Times that turn out otherwise than predicted: which are off, and plans that are made anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.auto.plans.correction import COMPUTE, COPIES, HOST, REBUILDING, Finding, find_off
from hf_pyao.auto.plans.plan_timing import PlanCheck, TimedMicroBatch
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.config import GIB
from hf_pyao.engine.recompute.verification import NUM_FIRST_FORWARDS
from hf_pyao.plan.hardware.device_limit import DeviceLimit
from hf_pyao.plan.hardware.speeds import DeviceModel
from hf_pyao.plan.solve.correction import Correction, ExpectedTimes
from tests.auto.test_auto_policy import (
    AUTO,
    NUM_MEASURED,
    SPEEDS,
    assert_same,
    batch_of,
    step,
    transport,
)
from tests.helpers import tiny_model
from tests.helpers.simulation.transport import SimulatedTransport

# ---- what is off, by numbers ---------------------------------------------------------------------

EXPECTED = ExpectedTimes(forward_ms=30.0, backward_ms=50.0, rebuild_ms=10.0, stall_ms=10.0)
SIZE = 1000


def timed(
    forward: float = 30.0, backward: float = 60.0, stall: float = 10.0, size: int = SIZE
) -> TimedMicroBatch:
    """Return a micro-batch with these ms of compute, and of waiting in backward."""
    return TimedMicroBatch(size, forward + backward + stall, stall, forward, 0.0)


def find(
    *micro_batches: TimedMicroBatch,
    known: frozenset[str] = frozenset(),
    under: Callable[[Correction], ExpectedTimes] = lambda _: EXPECTED,
) -> Finding | None:
    return find_off(micro_batches, SIZE, under, 40.0, known)


def test_what_was_predicted_and_a_little_noise_are_not_off() -> None:
    assert find(timed(), timed(), timed()) is None
    assert find(timed(31.0, 66.0, 12.0), timed(32.0, 63.0, 13.0)) is None


def test_a_single_slow_micro_batch_says_nothing() -> None:
    slow = timed(90.0, 180.0, 90.0)
    assert find(slow) is None
    for number in range(3):
        micro_batches = [timed()] * 3
        micro_batches[number] = slow
        assert find(*micro_batches) is None


@pytest.mark.parametrize("factor", [1.6, 0.4])
def test_where_the_device_waits_for_the_host_that_is_what_is_off(factor: float) -> None:
    times = ExpectedTimes(
        forward_ms=90.0, backward_ms=50.0, rebuild_ms=10.0, stall_ms=5.0, host_ms=60.0
    )
    micro_batches = [timed(90.0 * factor, 60.0 * factor, 5.0)] * 3
    found = find(*micro_batches, under=lambda _: times)
    assert found is not None
    assert found.causes == {HOST}
    assert found.correction == Correction(host=pytest.approx(factor))
    assert find(*micro_batches, under=lambda _: times, known=frozenset({HOST})) is None
    assert "sets the pace" in found.words
    # A host that the device hardly waits for is not to blame.
    rarely = replace(times, host_ms=3.0)
    found = find(*micro_batches, under=lambda _: rarely)
    assert found is not None
    assert found.causes == {COMPUTE}


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_compute_that_is_slower_or_faster_is_told_by_forward(factor: float) -> None:
    found = find(*[timed(30.0 * factor, 60.0 * factor)] * 3)
    assert found is not None
    assert found.causes == {COMPUTE}
    assert found.correction.compute == pytest.approx(factor)
    assert found.correction.backward == pytest.approx(1.0)
    assert found.correction.rebuild == pytest.approx(1.0)
    assert found.correction.copies == 1.0
    assert f"{factor:.2f} times" in found.words


def test_what_backward_takes_beyond_forwards_speed_is_the_rebuildings() -> None:
    found = find(*[timed(30.0, 90.0)] * 3)
    assert found is not None
    assert found.causes == {REBUILDING}
    assert found.correction == Correction(rebuild=4.0)
    found = find(*[timed(60.0, 140.0)] * 3)
    assert found is not None
    assert found.causes == {COMPUTE}
    assert found.correction.compute == pytest.approx(2.0)
    assert found.correction.rebuild == pytest.approx(2.0)


def test_where_nothing_is_rebuilt_backward_itself_is_slower() -> None:
    expected = replace(EXPECTED, backward_ms=60.0, rebuild_ms=0.0)
    found = find(*[timed(30.0, 90.0)] * 3, under=lambda _: expected)
    assert found is not None
    assert found.causes == {COMPUTE}
    assert found.correction.compute == 1.0
    assert found.correction.backward == pytest.approx(1.5)


def test_smaller_batches_are_faster_anyway() -> None:
    assert find(*[timed(15.0, 30.0, size=SIZE // 2)] * 3) is None
    slow = find(*[timed(45.0, 90.0, size=SIZE // 2)] * 3)
    assert slow is not None
    assert slow.causes == {COMPUTE}


def test_copies_are_blamed_for_what_faster_compute_does_not_explain() -> None:
    found = find(*[timed(stall=30.0)] * 3)
    assert found is not None
    assert found.causes == {COPIES}
    assert found.correction == Correction(copies=1.5)

    def under(correction: Correction) -> ExpectedTimes:
        return replace(EXPECTED, stall_ms=10.0 if correction.compute == 1.0 else 42.0)

    found = find(*[timed(15.0, 30.0, 40.0)] * 3, under=under)
    assert found is not None
    assert found.causes == {COMPUTE}
    found = find(*[timed(15.0, 30.0, 62.0)] * 3, under=under)
    assert found is not None
    assert found.causes == {COMPUTE, COPIES}
    assert found.correction.copies == pytest.approx(1.5)


def test_each_cause_is_found_once() -> None:
    slow = [timed(45.0, 90.0)] * 3
    compute = find(*slow)
    assert compute is not None
    assert find(*slow, known=compute.causes) is None
    waiting = [timed(stall=30.0)] * 3
    copies = find(*waiting, known=compute.causes)
    assert copies is not None
    assert copies.causes == {COPIES}
    assert find(*waiting, known=compute.causes | copies.causes) is None


# ---- plans that are made anew, on a virtual clock ------------------------------------------------

SLOWER = DeviceModel(
    tflop_per_s=SPEEDS.tflop_per_s / 1.5,
    memory_gib_per_s=SPEEDS.memory_gib_per_s / 1.5,
    launch_us=SPEEDS.launch_us * 1.5,
)
NUM_LAYERS = 6
Patch = pytest.MonkeyPatch


def times_of_steps(
    offloader: Offloader, model: torch.nn.Module, number: int, speeds: DeviceModel
) -> list[float]:
    """Run steps at these speeds; return what each takes on the virtual clock, in ms."""
    expected, found = None, []
    for _ in range(number):
        start_ms = clock_ms(offloader)
        gradients = step(model, BATCH, offloader, speeds)
        found.append(clock_ms(offloader) - start_ms)
        expected = expected or gradients
        assert_same(gradients, expected)
    return found


def clock_ms(offloader: Offloader) -> float:
    transport = offloader.transport
    assert isinstance(transport, SimulatedTransport)
    assert transport.link is not None
    return transport.link.compute_ms


BATCH = batch_of(16)


def model_and_cap() -> tuple[torch.nn.Module, PyAOConfig]:
    """Return a model, and a configuration whose cap is the lowest peak of the simple plans."""
    config = replace(AUTO, window=65536)
    model = tiny_model("opt", num_hidden_layers=NUM_LAYERS).train()
    with attach(model, replace(config, device_memory_gib=1.0), transport=transport()) as offloader:
        for _ in range(NUM_MEASURED + 1):
            step(model, BATCH, offloader)
        assert offloader.plan is not None
        figures = offloader.plan.numbers()
    least = min(value for name, value in figures.items() if name.startswith("peak_bytes/"))
    return model, replace(config, device_memory_gib=least / GIB)


@pytest.mark.thorough
def test_compute_that_slows_down_after_the_profile_gets_a_faster_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model, config = model_and_cap()
    expected = step(model, BATCH)
    with attach(model, config, transport=transport()) as offloader:
        times_of_steps(offloader, model, NUM_MEASURED, SPEEDS)
        first_ms = times_of_steps(offloader, model, NUM_MEASURED + 1, SLOWER)[-1]
        first = offloader.plan
        assert first is not None
        times_ms = times_of_steps(offloader, model, 3 * NUM_MEASURED, SLOWER)
        second = offloader.plan
        assert second is not None
        assert [slot.action for slot in second.slots] != [slot.action for slot in first.slots]
        assert times_ms[-1] < first_ms / 1.01
        assert times_ms[-1] == pytest.approx(second.facts.step_ms, rel=0.1)
        assert second.figures["correction/compute"] == pytest.approx(1.5, rel=0.01)
        assert second.facts.peak_bytes <= config.device_memory_gib * GIB
        assert_same(step(model, BATCH, offloader, SLOWER), expected)
        reported = offloader.auto.report()["plan"]["figures"]  # type: ignore[union-attr]
        for name in ("layers_ms", "compute_ms"):
            assert reported[f"measured_{name}"] == pytest.approx(
                reported[f"predicted_{name}"], rel=0.05
            )
    lines = [record.getMessage() for record in caplog.records]
    assert sum("(compute takes 1.5" in line for line in lines) == 1
    assert not any("drops its plan" in line for line in lines)


@pytest.mark.thorough
def test_what_another_process_takes_counts_for_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = model_and_cap()
    assert config.device_memory_gib is not None
    config = replace(config, device_memory_gib=1.2 * config.device_memory_gib)
    least_bytes = int(config.device_memory_gib * GIB / 1.1)
    with attach(model, config, transport=transport()) as offloader:
        times_of_steps(offloader, model, NUM_MEASURED + 1, SPEEDS)
        first = offloader.plan
        assert first is not None and first.facts.peak_bytes > least_bytes
        limit = DeviceLimit(least_bytes, 0, "what the other process leaves")
        monkeypatch.setattr(AutoSettings, "device_limit", lambda *_: limit)
        times_of_steps(offloader, model, 3 * NUM_MEASURED, SPEEDS)
        assert offloader.plan is not None
        assert offloader.plan.facts.peak_bytes <= least_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("factor", "then", "number"), [(1.0, 1.0, 0), (4.0, 1.0, 1), (4.0, 9.0, 2)]
)
def test_a_plan_slower_than_checkpointing_gives_way_to_it(
    factor: float, then: float, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    """As on a GPU for which Python is too slow; and back, where checkpointing is slower still.

    The plan takes *factor* times what is predicted, checkpointing *then* times.
    """
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model = tiny_model("gpt2").train()
    expected = step(model, BATCH)
    config = replace(AUTO, window=65536, device_memory_gib=0.003)
    with attach(model, config, transport=transport()) as offloader:
        again: list[int | None] = []

        def result(check: PlanCheck) -> list[TimedMicroBatch]:
            draft = offloader.auto.draft  # type: ignore[union-attr]
            if draft is None:  # everything is offloaded, to compare with
                return []
            times = draft.expected()
            slower = then if draft.chosen.num_checkpointed else factor
            forward_ms = slower * times.forward_ms
            backward_ms = slower * (times.backward_ms + times.rebuild_ms)
            return [timed(forward_ms, backward_ms, times.stall_ms, draft.num_elements)] * 2

        monkeypatch.setattr(PlanCheck, "result", result)
        for _ in range(6 * NUM_MEASURED + 3 * NUM_FIRST_FORWARDS):
            assert_same(step(model, BATCH, offloader), expected)
            if offloader.plan is not None:
                again.append(offloader.plan.num_checkpointed)
        assert again[0] is None
        assert (1 in again) == (number > 0)
        assert again[-1] == (1 if number == 1 else None)
    said = [record for record in caplog.records if "and this should take" in record.getMessage()]
    assert len(said) == (number > 0)
    dropped = sum("drops its plan" in record.getMessage() for record in caplog.records)
    assert dropped == (number == 2)


@pytest.mark.thorough
def test_another_plan_that_turns_out_slower_is_dropped_for_the_one_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="hf_pyao")
    model, config = model_and_cap()
    expected = step(model, BATCH)
    with attach(model, config, transport=transport()) as offloader:
        times_of_steps(offloader, model, NUM_MEASURED + 1, SPEEDS)
        first = offloader.plan
        assert first is not None
        factors = iter([1.5, 3.0])

        def result(check: PlanCheck) -> list[TimedMicroBatch]:
            expected = offloader.auto.draft.expected()  # type: ignore[union-attr]
            factor = next(factors)
            found = timed(
                factor * expected.forward_ms,
                factor * (expected.backward_ms + expected.rebuild_ms),
                expected.stall_ms,
                size=int(first.facts.num_elements or 0),
            )
            return [found] * NUM_MEASURED

        monkeypatch.setattr(PlanCheck, "result", result)
        plans = []
        # The first forwards of each plan are checked for second runs, and not timed.
        for _ in range(4 * NUM_MEASURED + 3 * NUM_FIRST_FORWARDS):
            assert_same(step(model, BATCH, offloader), expected)
            plans.append(offloader.plan)
        assert next(factors, None) is None
    actions = [[slot.action for slot in plan.slots] for plan in plans if plan is not None]
    assert any(each != actions[-1] for each in actions)
    assert actions[-1] == [slot.action for slot in first.slots]
    lines = [record.getMessage() for record in caplog.records]
    assert sum("where the plan before took" in line for line in lines) == 1
