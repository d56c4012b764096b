"""Recomputation under schedules that any real pair of streams could produce."""

from __future__ import annotations

import itertools

import pytest

from hf_pyao import PyAOConfig, attach
from tests.helpers.simulation.transport import SimulatedTransport
from tests.races.models import ARCHITECTURES, SCENARIOS, make_pair

NUM_SCHEDULES = 12
WINDOWS = ("layer", 0, 3_000, 2**20)
SETS = (("pointwise",), ("mlp_act", "attn_norm", "mlp_norm"), ("*",))
VARIANTS = tuple(itertools.product(WINDOWS, (1, 2), SCENARIOS, SETS))
STRIDE = 29
"""Coprime to the number of variants: successive schedules differ in everything."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(every=1000)
def test_gradients_are_bit_identical_under_adversarial_schedules(architecture: str) -> None:
    model, plain = make_pair(architecture)
    expected = {name: run(plain) for name, run in SCENARIOS.items()}
    for seed in range(NUM_SCHEDULES):
        window, copy_streams, scenario, names = VARIANTS[seed * STRIDE % len(VARIANTS)]
        transport = SimulatedTransport(seed, copy_streams=copy_streams)
        config = PyAOConfig(
            policy="all",
            min_bytes=0,
            window=window,
            keep_last_layers=seed % 2,
            recompute_modules=names,
        )
        with attach(model, config, transport=transport) as offloader:
            result = SCENARIOS[scenario](model)
            where = f"seed {seed}, window {window}, {copy_streams} streams, {scenario}, {names}"
            difference = result.difference_from(expected[scenario])
            assert difference is None, f"{where}: {difference}"
            assert offloader.host_pool.settle() == 0, f"{where}: host buffers still in use"
            assert not transport.violations, f"{where}: {transport.violations}"
        assert offloader.totals()["recomputed_bytes"] > 0, where
