"""Layers made of random operations: the same gradients, whatever is offloaded and recomputed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from hf_pyao import PyAOConfig, attach
from tests.helpers import EVERY_LAYER, FunctionLayer, Stack, assert_same_tensors, gradients_of
from tests.helpers.simulation.transport import SimulatedTransport

Step = Callable[[FunctionLayer, torch.Tensor, torch.Tensor], torch.Tensor]


def changed_half(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    copy_of_a = a.clone()
    copy_of_a[1:3].copy_(b[:2])
    return copy_of_a


def counted(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    layer.count += 1
    return a * layer.count.sin()


def averaged(layer: FunctionLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a - layer.mean
    with torch.no_grad():
        layer.mean.lerp_(a.detach().mean(0), 0.1)
    return result


STEPS: tuple[Step, ...] = (
    lambda layer, a, b: a * b,
    lambda layer, a, b: a + 0.3 * b,
    lambda layer, a, b: F.gelu(a),
    lambda layer, a, b: a.sigmoid(),
    lambda layer, a, b: a.clone().mul_(1.3).relu_(),
    lambda layer, a, b: F.dropout(a, 0.3),
    lambda layer, a, b: (a.to(torch.bfloat16) * 0.5).float().tanh(),
    lambda layer, a, b: F.layer_norm(a, a.shape[-1:]),
    lambda layer, a, b: a.softmax(-1),
    lambda layer, a, b: (a @ layer.weight).tanh(),
    lambda layer, a, b: b * (a > 0).to(a.dtype),
    lambda layer, a, b: a.t().contiguous().t() * b,
    lambda layer, a, b: torch.cat([a[:2], b[2:]]).clamp(max=1.5).exp(),
    lambda layer, a, b: a.view(2, 2, -1).transpose(0, 1).reshape(a.shape).sin(),
    lambda layer, a, b: a.expand(3, *a.shape).mean(0) * b.mean(),
    lambda layer, a, b: torch.where(a > b, a.cos(), b.exp().log1p()),
    lambda layer, a, b: torch.exp(-a.square()).chunk(2, dim=-1)[0].repeat(1, 2).flip(0) * b,
    lambda layer, a, b: a * (torch.rand_like(a) + torch.bernoulli(torch.full_like(b, 0.5))),
    lambda layer, a, b: a * b.double().gather(-1, a.abs().argmax(-1, keepdim=True)).float(),
    changed_half,
    counted,
    averaged,
)


def random_layer(seed: int) -> Callable[[FunctionLayer, torch.Tensor], torch.Tensor]:
    """Return a layer function that runs a dozen of the steps on earlier results."""
    chooser = random.Random(seed)
    plan = [
        (chooser.choice(STEPS), chooser.randrange(10**6), chooser.randrange(10**6))
        for _ in range(12)
    ]

    def run(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        results = [x * 1.0, x @ layer.weight]
        for step, first, second in plan:
            a, b = results[-1 - first % 2], results[second % len(results)]
            results.append(step(layer, a, b))
        return torch.tanh(results[-1] + results[-2])

    return run


CONFIGS = {
    "offloaded": EVERY_LAYER,
    "pointwise recomputed": replace(EVERY_LAYER, window=256, recompute_modules=("pointwise",)),
    "all recomputed": replace(EVERY_LAYER, window=64, recompute_modules=("*", ".")),
}


SIZES = (4, 40, 300)
"""Of a row: a buffer of one is copied, held as it is, or known as a buffer of the model's."""


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first_seed", [0, 20])
def test_random_layers_compute_the_same_bits(
    config: PyAOConfig, size: int, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 20):
        model = Stack(random_layer(seed), random_layer(seed + 1000), size=size)
        for layer in model.layers:
            layer.register_buffer("count", torch.zeros(()))
            layer.register_buffer("mean", torch.zeros(size))
        plain = copy.deepcopy(model)
        x = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
        with attach(model, config, transport=SimulatedTransport(seed)) as offloader:
            for each in (plain, model):
                torch.manual_seed(seed)
                for _ in range(2):
                    each(x).square().sum().backward()
            assert_same_tensors(gradients_of(model), gradients_of(plain), f"seed {seed}")
            for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
                assert torch.equal(mine, theirs), f"seed {seed}: replay changed a buffer"
            assert offloader.host_pool.settle() == 0, f"seed {seed}"
