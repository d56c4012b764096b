"""The noise is that of its definition, whatever part of it is drawn, and looks normal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_pyao.engine.zeroth_order.noise import NoiseKey, noise
from tests.helpers.plain_mezo import counted_noise

CPU = torch.device("cpu")


@pytest.mark.parametrize("step", [0, 3, 2**33 + 5])
@pytest.mark.parametrize("size", [1, 6, 4099])
def test_the_bits_are_those_of_the_definition(step: int, size: int) -> None:
    ours = noise(NoiseKey.of(7, "layers.0.weight"), step, 0, size, CPU)
    expected = counted_noise(7, "layers.0.weight", step, size)
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(("first", "end"), [(0, 5), (3, 4), (5, 97), (96, 100)])
def test_a_part_is_the_same_as_in_the_whole(first: int, end: int) -> None:
    key = NoiseKey.of(0, "w")
    assert torch.equal(noise(key, 2, first, end, CPU), noise(key, 2, 0, 100, CPU)[first:end])


def test_it_is_normal() -> None:
    z = noise(NoiseKey.of(1, "w"), 0, 0, 1 << 18, CPU).double()
    assert abs(float(z.mean())) < 0.01
    assert abs(float(z.var()) - 1) < 0.01
    assert abs(float((z**4).mean()) - 3) < 0.1
    for lag in (1, 2, 3, 4):  # the four of a counter, and the next one
        assert abs(float((z[:-lag] * z[lag:]).mean())) < 0.01


def test_seed_name_and_step_give_other_noise() -> None:
    drawn = [
        noise(NoiseKey.of(seed, name), step, 0, 1 << 14, CPU).double()
        for seed, name, step in ((0, "w", 0), (1, "w", 0), (0, "v", 0), (0, "w", 1))
    ]
    for number, each in enumerate(drawn):
        for other in drawn[:number]:
            assert abs(float((each * other).mean())) < 0.04
