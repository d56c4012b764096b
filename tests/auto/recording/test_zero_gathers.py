"""What ZeRO-3 gathers and lets go of, by its rules, without DeepSpeed and without other ranks.

Two processes that DeepSpeed trains are in ``tests/distributed/test_zero_plans.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao.auto.recording.zero_gathers import Gathers, PartitionedParameter, Place, Thresholds
from hf_pyao.auto.recording.zero_gradients import (
    BucketedGradients,
    BucketSettings,
    PartitionedGradients,
)
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.plan.step.recording_mode import RecordingMode
from hf_pyao.plan.step.step_program import Operation
from hf_pyao.plan.step.step_recorder import StepRecorder

WIDTH = 6
NUM_RANKS = 2
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH


class Seen(Gathers):
    """Notes what is whole after it has come to a module, and after it has left it."""

    def note(self, module: nn.Module) -> tuple[str, frozenset[str]]:
        names = {module: name for name, module in self._root.named_modules()}
        whole = {
            f"{name}.{own}"
            for inner, name in names.items()
            for own, each in inner.named_parameters(recurse=False)
            if next(p for p in self.parameters_of(inner) if p.parameter is each).place
            is Place.WHOLE
        }
        return names[module], frozenset(whole)

    def enter(self, module: nn.Module, *, is_forward: bool) -> None:
        super().enter(module, is_forward=is_forward)
        self.entered.append(self.note(module))

    def leave(self, module: nn.Module, *, is_forward: bool) -> None:
        super().leave(module, is_forward=is_forward)
        self.left.append(self.note(module))

    def clear(self) -> None:
        self.entered: list[tuple[str, frozenset[str]]] = []
        self.left: list[tuple[str, frozenset[str]]] = []


def refuse(why: str) -> None:
    raise AssertionError(why)


def divided(model: nn.Module, thresholds: Thresholds, persistent: int = 0) -> Seen:
    """Partition *model* among two ranks, of which this is one; what is gathered is not computed."""
    found = {}
    for number, each in enumerate(model.parameters()):
        part = torch.zeros(-(-each.numel() // NUM_RANKS))
        persists = each.numel() <= persistent
        found[each] = PartitionedParameter(each, each.shape, part, number, persists, False)

    def parameters_of(module: nn.Module) -> Iterator[PartitionedParameter]:
        for each in module.parameters(recurse=False):
            yield found[each]

    gathers = Seen(model, parameters_of, thresholds, NUM_RANKS, lambda module: False, refuse)
    gathers.clear()
    gathers.install()
    for each in found.values():
        each.let_go()
    gathers.gather_persistent(found.values())
    return gathers


def micro_batch(model: nn.Module, gathers: Gathers) -> None:
    model(torch.ones(3, WIDTH, requires_grad=True)).sum().backward()
    gathers.end_micro_batch()


def layers(num: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num)))


def test_without_thresholds_weights_are_there_for_their_own_module_alone() -> None:
    model = layers()
    gathers = divided(model, Thresholds(0, 10**9, 0))
    for _ in range(2):
        gathers.clear()
        micro_batch(model, gathers)
        # Nothing of the sequence itself; the innermost modules in turn, and back.
        seen = [each for each in gathers.entered if each[0]]
        assert [name for name, _ in seen] == ["0", "1", "2", "2", "1", "0"]
        assert all(whole == {f"{name}.weight", f"{name}.bias"} for name, whole in seen)
        assert all(not whole for _, whole in gathers.left)
        assert all(each.numel() == 0 for each in model.parameters())


@pytest.mark.parametrize("persistent", [0, BIAS])
def test_what_persists_stays(persistent: int) -> None:
    model = layers()
    gathers = divided(model, Thresholds(0, 10**9, 0), persistent)
    micro_batch(model, gathers)  # in which ZeRO-3 lets go of all of it
    gathers.gather_persistent(gathers.parameters_of(model[0]) + gathers.parameters_of(model[1]))
    gathers.clear()
    micro_batch(model, gathers)
    stays = {"0.bias", "1.bias"} if persistent else set()
    assert all(stays <= whole for _, whole in (*gathers.entered, *gathers.left))
    assert not any("weight" in name for name in gathers.left[-1][1])


def test_what_is_used_again_within_the_distance_stays() -> None:
    model = layers()
    gathers = divided(model, Thresholds(0, 10**9, WEIGHT + BIAS))
    micro_batch(model, gathers)
    gathers.clear()
    micro_batch(model, gathers)
    left = [whole for name, whole in gathers.left if name]
    # The last layer's forward is followed by its backward: it is not let go of in between.
    assert left == [set(), set(), {"2.weight", "2.bias"}, set(), set(), set()]


def test_what_comes_next_is_under_way_once_the_order_is_known() -> None:
    model = layers()
    gathers = divided(model, Thresholds(1, 10**9, 0))
    places: list[Place] = []

    def note(*_: object) -> None:
        places.append(gathers.parameters_of(model[1])[0].place)

    model[0].register_forward_hook(note)
    micro_batch(model, gathers)
    micro_batch(model, gathers)
    assert places == [Place.PARTITIONED, Place.UNDER_WAY]


def test_no_more_than_the_live_parameters_that_are_allowed_is_gathered_ahead() -> None:
    model = layers()
    gathers = divided(model, Thresholds(10**9, WEIGHT + BIAS, 0))
    micro_batch(model, gathers)
    gathers.clear()
    micro_batch(model, gathers)
    seen = [each for each in gathers.entered if each[0]]
    assert all(whole == {f"{name}.weight", f"{name}.bias"} for name, whole in seen)


def test_a_micro_batch_in_another_order_is_refused() -> None:
    model = layers()
    gathers = divided(model, Thresholds(0, 10**9, 0))
    micro_batch(model, gathers)
    micro_batch(model, gathers)
    first, second, third = model
    model[0], model[1] = second, first
    with pytest.raises(AssertionError, match="another order"):
        micro_batch(model, gathers)
    assert model[2] is third


def recorded(model: nn.Module, gathers: Gathers, recorder: StepRecorder) -> list[Operation]:
    """Return the operations of a micro-batch."""
    recorder.begin(["0"], lambda storage: False)
    with RecordingMode(recorder):
        micro_batch(model, gathers)
    return list(recorder.program(0).operations)


def awaited(operations: list[Operation]) -> list[tuple[str, int]]:
    """Return what waits, and for which collective of the step."""
    found, num_queued = [], 0
    for each in operations:
        if each.awaits:
            found.append((each.name, num_queued - each.awaits))
        num_queued += each.collective is not None
    return found


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_gather_is_a_collective_that_compute_waits_for(runs_ahead: bool) -> None:
    model = layers()
    gathers = divided(model, Thresholds(0, 10**9, 0))
    micro_batch(model, gathers)
    recorder = StepRecorder()
    gathers.tell(recorder.exchanged, runs_ahead=runs_ahead)
    operations = recorded(model, gathers, recorder)
    found = [each.collective for each in operations if each.collective]
    half = 4 * (WEIGHT + BIAS) // NUM_RANKS
    # Of three modules, forward and backward.
    assert [tuple(each) for each in found] == [(half, runs_ahead)] * 6
    assert [number for _, number in awaited(operations)] == list(range(6))


@pytest.mark.parametrize("num_beside", [0, 1, 3])
def test_reductions_run_beside_compute_as_far_as_the_engine_lets_them(num_beside: int) -> None:
    model = layers(6)
    gathers = divided(model, Thresholds(0, 10**9, 0))
    micro_batch(model, gathers)
    recorder = StepRecorder()
    own = replace(settings(WEIGHT + BIAS), num_beside=num_beside)
    gradients = PartitionedGradients(list(model.parameters()), own, torch.empty(WEIGHT + BIAS))
    gradients.install()
    gradients.tell(recorder.exchanged)
    operations = recorded(model, gathers, recorder)
    reductions = [each.collective for each in operations if each.collective]
    # The last layer's gradients wait in the bucket until backward has ended.
    assert [tuple(each) for each in reductions] == [(4 * (WEIGHT + BIAS) // NUM_RANKS, False)] * 5
    names, numbers = zip(*awaited(operations), strict=True)
    assert set(names) == {"reduce_scatter" if num_beside else "wait"}
    assert list(numbers) == list(range(5 - num_beside))


def settings(num_elements: int, *, is_offloaded: bool = False) -> BucketSettings:
    return BucketSettings(
        num_elements=num_elements,
        sent_dtype=torch.float32,
        is_contiguous=True,
        scatters=True,
        overlaps=False,
        is_offloaded=is_offloaded,
        num_ranks=NUM_RANKS,
    )


def peak_beside(model: nn.Module, run_end: object) -> int:
    """Return the most bytes in a backward, its parameters and bucket apart."""
    ledger = MemoryLedger()
    ledger.note(model.parameters())
    before = ledger.live_bytes
    with NotingMode(ledger):
        model(torch.ones(1, WIDTH)).sum().backward()
        run_end()  # type: ignore[operator]
    return ledger.peak_bytes - before


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_zero_2_keeps_this_ranks_gradients_alone(is_offloaded: bool) -> None:
    model = layers(8)
    whole = peak_beside(model, lambda: None)
    model.zero_grad()
    all_of_them = list(model.parameters())
    owners = {
        id(each): frozenset({number >= len(all_of_them) // 2})
        for number, each in enumerate(all_of_them)
    }
    gradients = BucketedGradients(
        all_of_them, settings(WEIGHT + BIAS, is_offloaded=is_offloaded), owners, at_end=False
    )
    gradients.install()
    peak = peak_beside(model, gradients.end_micro_batch)
    bucket_bytes = 4 * (WEIGHT + BIAS)
    others = whole - 8 * bucket_bytes
    # This rank's half of eight layers' gradients; or a norm in float64.
    kept = 8 * WEIGHT if is_offloaded else 4 * bucket_bytes
    assert peak <= others + kept + 3 * bucket_bytes < whole
    kept = [each for each in all_of_them if each.grad is not None]
    assert kept == ([] if is_offloaded else all_of_them[len(all_of_them) // 2 :])


@pytest.mark.parametrize("first", [0, 1])
def test_zero_2_is_counted_as_on_the_rank_that_keeps_the_first_gradients(first: int) -> None:
    model = layers(8)
    # Layers come last to first in backward; of their parameters the last three have an owner.
    owners = {
        id(each): frozenset({first if number >= 13 else 1 - first})
        for number, each in enumerate(model.parameters())
    }
    gradients = BucketedGradients(
        list(model.parameters()), settings(WEIGHT + BIAS), owners, at_end=False
    )
    gradients.install()
    peak_beside(model, gradients.end_micro_batch)
    kept = [number for number, each in enumerate(model.parameters()) if each.grad is not None]
    assert kept == [13, 14, 15]


def test_zero_1_reduces_when_all_gradients_are_there() -> None:
    model = layers(4)
    owners = {id(each): frozenset({n >= 4}) for n, each in enumerate(model.parameters())}
    gradients = BucketedGradients(list(model.parameters()), settings(WEIGHT), owners, at_end=True)
    gradients.install()
    model(torch.ones(1, WIDTH)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    gradients.end_micro_batch()
    # All are there: the first rank's have places of their own, the others lie in the bucket.
    kept = {
        number: each.grad.untyped_storage().nbytes()
        for number, each in enumerate(model.parameters())
        if each.grad is not None
    }
    half = 4 * 2 * (WEIGHT + BIAS)
    assert list(kept) == list(range(8))
    assert [nbytes == half for nbytes in kept.values()] == [True] * 4 + [False] * 4


def test_zero_3_leaves_no_gradient_behind() -> None:
    model = layers(4)
    bucket = torch.empty(WEIGHT)
    gradients = PartitionedGradients(list(model.parameters()), settings(WEIGHT), bucket)
    gradients.install()
    model(torch.ones(1, WIDTH)).sum().backward()
    waiting = [each for each in model.parameters() if each.grad is not None]
    assert 0 < len(waiting) < 8
    assert all(
        each.grad.untyped_storage()._cdata == bucket.untyped_storage()._cdata  # type: ignore[union-attr]
        for each in waiting
    )
    gradients.end_micro_batch()
    assert all(each.grad is None for each in model.parameters())
