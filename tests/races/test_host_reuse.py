"""Host memory is reserved once and reused: nothing is allocated in the steady state.

PyAO paper, section 8.5.
"""

from __future__ import annotations

import random

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from races.models import make_model
from tests.helpers.simulation.transport import SimulatedTransport


def _step(model: torch.nn.Module, length: int) -> None:
    ids = torch.randint(3, 32, (2, length))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("window", ["layer", 4096])
def test_no_host_memory_is_reserved_after_the_third_micro_batch(window: str | int) -> None:
    model = make_model("gpt2")
    config = PyAOConfig(policy="all", min_bytes=0, window=window)
    with attach(model, config, transport=SimulatedTransport(1)) as offloader:
        for _ in range(3):
            _step(model, 8)
        reserved = offloader.host_pool.num_slab_allocations, offloader.host_pool.pool_bytes
        for _ in range(10):
            _step(model, 8)
        pool = offloader.host_pool
        assert (pool.num_slab_allocations, pool.pool_bytes) == reserved


@pytest.mark.thorough
def test_sequence_lengths_seen_before_need_no_new_memory() -> None:
    model = make_model("llama")
    lengths = [4, 7, 12, 16, 29]
    with attach(
        model, PyAOConfig(policy="all", min_bytes=0), transport=SimulatedTransport(2)
    ) as offloader:
        pool = offloader.host_pool
        for length in lengths:
            _step(model, length)
        reserved = pool.num_slab_allocations, pool.pool_bytes
        order = lengths * 6
        random.Random(0).shuffle(order)
        for length in order:
            _step(model, length)
            assert pool.settle() == 0
        assert (pool.num_slab_allocations, pool.pool_bytes) == reserved


def test_ranges_show_phases_and_layers_in_a_profile() -> None:
    model = make_model("opt")
    profile = torch.profiler.profile(acc_events=True)
    with attach(model, PyAOConfig(policy="all", min_bytes=0)), profile:
        _step(model, 8)
    names = {event.name for event in profile.events() if event.name.startswith("pyao::")}
    for phase in ("offload", "layer_end", "backward_start", "reload"):
        assert f"pyao::{phase} (model.decoder.layers.0)" in names
