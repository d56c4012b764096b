"""Gradients stay bit-identical under every schedule that a pair of streams could produce.

2,000 seeded schedules run here: models x one and two streams x windows x scenarios. The number is
set by ``PYAO_TEST_SCHEDULES``; a run with 100,000 is recorded in ``recipes/results``.
"""

from __future__ import annotations

import itertools
import os

import pytest

from hf_pyao import PyAOConfig, attach
from hf_pyao.runtime.simulated import SimulatedTransport
from races.models import ARCHITECTURES, SCENARIOS, make_pair

NUM_SCHEDULES = int(os.environ.get("PYAO_TEST_SCHEDULES", "2000"))
WINDOWS = ("layer", 0, 3_000, 2**20)
VARIANTS = tuple(itertools.product(WINDOWS, (1, 2), SCENARIOS))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_bit_identical_under_adversarial_schedules(architecture: str) -> None:
    model, plain = make_pair(architecture)
    expected = {name: run(plain) for name, run in SCENARIOS.items()}
    num_copies = 0
    for seed in range(-(-NUM_SCHEDULES // len(ARCHITECTURES))):
        window, copy_streams, scenario = VARIANTS[seed % len(VARIANTS)]
        transport = SimulatedTransport(seed, copy_streams=copy_streams)
        config = PyAOConfig(min_bytes=0, window=window, keep_last_layers=seed % 2)
        with attach(model, config, transport=transport) as offloader:
            result = SCENARIOS[scenario](model)
            where = f"seed {seed}, window {window}, {copy_streams} streams, {scenario}"
            difference = result.difference_from(expected[scenario])
            assert difference is None, f"{where}: {difference}"
            assert offloader.host_pool.settle() == 0, f"{where}: host buffers still in use"
            assert not transport.violations, f"{where}: {transport.violations}"
        num_copies += sum(transport.num_copies.values())
    assert num_copies > NUM_SCHEDULES * 10  # the schedules had something to get wrong
