"""``zo2_order=True`` against ZO2's documented algorithm, written down a second time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hf_pyao import ZerothOrder, ZerothOrderSettings
from hf_pyao.errors import ConfigError
from tests.helpers import FunctionLayer, Stack

EPSILON, RATE = 1e-2, 1e-3
WORDS, SIZE = 40, 8


def product(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ layer.weight) * layer.scale + x


class Small(nn.Module):
    """Embedding, three layers, norm, and a head that has the embedding's weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)  # registered before the layers, visited behind them
        self.embed = nn.Embedding(WORDS, SIZE)
        self.body = Stack(*[product] * 3, size=SIZE)
        for layer in self.body.layers:
            layer.scale = nn.Parameter(torch.ones(SIZE))
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.body(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def visited(self) -> list[nn.Module]:
        return [self.embed, *self.body.layers, self.norm, self.head]


class PlainZO2:
    """Algorithm 3: each module runs for both inputs as it is visited; shares nothing with ours."""

    def __init__(self, model: Small, seed: int, pristine: bool) -> None:
        self.model, self.pristine = model, pristine
        self.seeds = np.random.RandomState(seed)
        self.generator = torch.Generator()
        self.last: tuple[list[torch.Tensor], float] | None = None

    def _add(self, module: nn.Module, scale: float) -> None:
        for p in module.parameters():
            z = torch.normal(0.0, 1.0, p.shape, generator=self.generator, dtype=p.dtype)
            p.data = p.data + scale * z * EPSILON

    def _update(self, module: nn.Module, state: torch.Tensor, gradient: float) -> None:
        self.generator.set_state(state)
        for p in module.parameters():
            z = torch.normal(0.0, 1.0, p.shape, generator=self.generator, dtype=p.dtype)
            p.data = p.data - RATE * (gradient * z)

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> float:
        self.generator.manual_seed(int(self.seeds.randint(1_000_000_000)))
        state, states = self.generator.get_state(), []
        plus = minus = ids
        for number, module in enumerate(self.model.visited()):
            if self.last is not None:
                self._update(module, self.last[0][number], self.last[1])
            states.append(state)
            kept = [p.data.clone() for p in module.parameters()]
            self.generator.set_state(state)
            self._add(module, 1)
            plus = module(plus)
            if self.pristine:
                for p, q in zip(module.parameters(), kept, strict=True):
                    p.data = q
            self.generator.set_state(state)
            self._add(module, -1 if self.pristine else -2)
            minus = module(minus)
            self.generator.set_state(state)
            if self.pristine:
                for p, q in zip(module.parameters(), kept, strict=True):
                    p.data = q
                self._add(module, 0)
            else:
                self._add(module, 1)
            state = self.generator.get_state()
        losses = [
            float(nn.functional.cross_entropy(each.flatten(0, 1), ids.flatten()))
            for each in (plus, minus)
        ]
        gradient = (losses[0] - losses[1]) / (2 * EPSILON)
        self.last = states, gradient
        return gradient

    @torch.no_grad()
    def flush(self) -> None:
        assert self.last is not None
        for module, state in zip(self.model.visited(), self.last[0], strict=True):
            self._update(module, state, self.last[1])


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(WORDS, (2, 6), generator=generator) for _ in range(count)]


def small(is_tied: bool, dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(2)
    return Small(is_tied).to(dtype)


def gradients_of(
    model: Small, ids: list[torch.Tensor], num_resident: int = 0, resume_at: int = -1
) -> list[float]:
    settings = ZerothOrderSettings(epsilon=EPSILON, seed=4, zo2_order=True)
    made, found = ZerothOrder(model, settings, num_resident=num_resident), []
    for number, each in enumerate(ids):
        if number == resume_at:
            state = made.state_dict()
            made.close()
            made = ZerothOrder(model, settings, num_resident=num_resident)
            made.load_state_dict(state)
        made.accumulate(model, lambda model, each=each: model(each))
        found.append(made.end_step(RATE))
    made.close()
    return found


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_resident", [0, 2])
@pytest.mark.sampled(every=3)
def test_bits_are_those_of_the_documented_order(
    is_tied: bool, dtype: torch.dtype, num_resident: int
) -> None:
    model, ids = small(is_tied, dtype), batches(6)
    twin = copy.deepcopy(model)
    plain = PlainZO2(twin, 4, pristine=True)
    expected = [plain.step(each) for each in ids]
    plain.flush()
    assert gradients_of(model, ids, num_resident) == expected
    for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_its_loss_curve_is_that_of_adding_and_taking_away() -> None:
    model, ids = small(is_tied=True), batches(6)
    plain = PlainZO2(copy.deepcopy(model), 4, pristine=False)
    expected = [plain.step(each) for each in ids]
    assert gradients_of(model, ids) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_without_ties_a_resumed_run_has_the_same_bits() -> None:
    model, ids = small(is_tied=False), batches(6)
    twin = copy.deepcopy(model)
    assert gradients_of(model, ids) == gradients_of(twin, ids, resume_at=3)


def test_a_tied_head_has_a_noise_of_its_own() -> None:
    ids = batches(1)
    settings = ZerothOrderSettings(seed=4, zo2_order=True)
    model = small(is_tied=True)
    seen = []
    with ZerothOrder(model, settings) as made:
        for module in (model.embed, model.head):
            module.register_forward_hook(
                lambda module, *_: seen.append(module.weight.detach().clone())
            )
        made.accumulate(model, lambda model: model(ids[0]))
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[1], seen[3])


def test_what_zo2_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="stream_embeddings"):
        ZerothOrder(small(False), ZerothOrderSettings(zo2_order=True), stream_embeddings="on")
    with ZerothOrder(small(False)) as made:
        state = made.state_dict()
    with (
        ZerothOrder(small(False), ZerothOrderSettings(zo2_order=True)) as made,
        pytest.raises(ConfigError, match="zo2_order"),
    ):
        made.load_state_dict(state)
