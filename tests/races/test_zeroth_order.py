"""Zeroth order under hostile schedules of its copies, with faults that these must show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import PyAOError
from tests.helpers import FunctionLayer, Stack
from tests.helpers.plain_mezo import PlainMeZO, PlainPackedMeZO
from tests.helpers.simulation.transport import SimulatedRaceError, SimulatedTransport

SIZE, WORDS = 8, 256
EPSILON, RATE = 1e-2, 1e-2
NUM_SCHEDULES = 2000


def product(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ layer.weight) + x


class Words(nn.Module):
    """An embedding, layers, and a head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.body = Stack(*[product] * num_layers, size=SIZE)
        self.head = nn.Linear(SIZE, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def words(num_layers: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return Words(num_layers)


class Losses:
    """Two micro-batches."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [torch.randint(WORDS, (2, 6), generator=generator) for _ in range(2)]

    def __call__(self, model: nn.Module) -> list[torch.Tensor]:
        return [model(batch) for batch in self.batches]


Bits = list[torch.Tensor]


@functools.cache
def expected_bits(momentum: float, transfer_dtype: str | None, num_layers: int) -> Bits:
    model, losses = words(num_layers), Losses()
    if transfer_dtype is None:
        plain = PlainMeZO(model, EPSILON, momentum, seed=3)
    else:
        plain = PlainPackedMeZO(model, EPSILON, momentum, seed=3)
    found = [torch.tensor(plain.step(losses, RATE)) for _ in range(2)]
    read = {name: plain.read(name, p.detach()) for name, p in model.named_parameters()}
    found.append(torch.func.functional_call(model, read, losses.batches[0]).detach())
    found.append(torch.tensor(plain.step(losses, RATE)))
    return [*found, *(p.detach() for p in model.parameters())]


def found_bits(
    transport: Any,
    momentum: float,
    num_resident: int,
    transfer_dtype: str | None,
    num_layers: int,
) -> Bits:
    model, losses = words(num_layers), Losses()
    settings = ZerothOrderSettings(
        epsilon=EPSILON, momentum=momentum, seed=3, transfer_dtype=transfer_dtype
    )
    with ZerothOrder(
        model, settings, transport=transport, num_resident=num_resident, host_memory_gib=0.01
    ) as made:

        def step(evaluates: bool = False) -> torch.Tensor:
            for batch in losses.batches:
                made.accumulate(model, lambda model: model(batch))
            if evaluates:
                model(losses.batches[0])
            return torch.tensor(made.end_step(RATE))

        found = [step(), step(), model(losses.batches[0]).detach(), step(evaluates=True)]
    return [*found, *(p.detach() for p in model.parameters())]


def is_right(seed: int, transfer_dtype: str | None = None) -> bool:
    """Say whether a run under schedule *seed* has the plain run's bits."""
    transport = SimulatedTransport(seed, copy_streams=1 + seed % 2)
    momentum, num_resident, num_layers = 0.9 * (seed // 4 % 2), seed % 3, 4
    if transfer_dtype is not None:  # layers that stay are not rounded; two stay in their slots
        num_resident, num_layers = 0, 2 + seed % 3
    found = found_bits(transport, momentum, num_resident, transfer_dtype, num_layers)
    expected = expected_bits(momentum, transfer_dtype, num_layers)
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return same and transport.violations == []


@pytest.mark.parametrize(
    "num_schedules", [16, pytest.param(NUM_SCHEDULES, marks=pytest.mark.thorough)]
)
def test_bits_are_those_of_a_plain_run_under_every_schedule(num_schedules: int) -> None:
    for seed in range(num_schedules):
        assert is_right(seed), seed


# ---- faults --------------------------------------------------------------------------------------


def _no_wait_for_an_upload() -> Any:
    """Compute reads a slot without waiting for the upload into it."""

    def await_fill(self: DeviceBlock) -> None:
        self.is_here = True

    return mock.patch.object(DeviceBlock, "await_fill", await_fill)


def _upload_does_not_wait_for_the_copy_from_its_slot() -> Any:
    """An upload overwrites a slot whose block is still on its way to the host."""

    def upload(self: WeightVisits, block: int, slot: int) -> None:
        own = list(self._copies_back.get(block, ()))
        self._slots[slot].refill(self.blocks[block], self._slot_nbytes, own)

    return mock.patch.object(WeightVisits, "upload", upload)


def _upload_does_not_wait_for_its_own_block() -> Any:
    """A block is uploaded again while its updated weights are still on their way to the host."""

    def upload(self: WeightVisits, block: int, slot: int) -> None:
        left = self._slots[slot].block.index
        after = [] if left == block else list(self._copies_back.get(left, ()))
        self._slots[slot].refill(self.blocks[block], self._slot_nbytes, after)

    return mock.patch.object(WeightVisits, "upload", upload)


def _update_does_not_wait_for_the_last_copy() -> Any:
    """A block that stays in its slot is updated while its last copy back still reads it."""
    own = WeightVisits._update

    def update(self: WeightVisits, block: Any, slot: Any) -> None:
        self._copies_back.pop(block.index, None)
        own(self, block, slot)

    return mock.patch.object(WeightVisits, "_update", update)


def _flush_does_not_wait() -> Any:
    """Files are read while copies back still run."""
    return mock.patch.object(WeightVisits, "_wait_for_copies", return_value=None)


def _an_update_is_not_copied_back() -> Any:
    """A block is updated on the device, and the host keeps the old bits."""

    def copy_back(self: WeightVisits, block: Any, slot: Any) -> None:
        if block.index != 1:
            own(self, block, slot)

    own = WeightVisits._copy_back
    return mock.patch.object(WeightVisits, "_copy_back", copy_back)


def _an_update_is_made_twice() -> Any:
    """The steps that a block has seen are not noted."""

    own = TrainedWeights.note_updated

    def note(self: TrainedWeights, weight: Any) -> None:
        if "0" not in weight.name:
            own(self, weight)

    return mock.patch.object(TrainedWeights, "note_updated", note)


def _the_slot_keeps_the_perturbation() -> Any:
    """A pass perturbs the weights in the slot, and both passes read the sum."""
    own = TrainedWeights.perturbed

    def perturbed(self: Any, weight: Any, data: torch.Tensor, sign: int) -> torch.Tensor:
        return data.copy_(own(self, weight, data, sign))

    return mock.patch.object(TrainedWeights, "perturbed", perturbed)


MUTANTS: tuple[Callable[[], Any], ...] = (
    _no_wait_for_an_upload,
    _upload_does_not_wait_for_the_copy_from_its_slot,
    _upload_does_not_wait_for_its_own_block,
    _update_does_not_wait_for_the_last_copy,
    _flush_does_not_wait,
    _an_update_is_not_copied_back,
    _an_update_is_made_twice,
    _the_slot_keeps_the_perturbation,
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # at the end of one
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_fault_shows_under_some_schedule(mutant: Callable[[], Any]) -> None:
    with mutant():
        for seed in range(120):
            try:
                if not is_right(seed):
                    return
            except (PyAOError, SimulatedRaceError):
                return
    pytest.fail("no schedule has shown it")
