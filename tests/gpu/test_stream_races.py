"""Copies or compute held back by sleeping kernels: what is ordered by luck alone breaks here."""

from __future__ import annotations

from typing import Any

import pytest

from hf_pyao import PyAOConfig, attach
from tests.gpu.device import Device
from tests.gpu.training import ARCHITECTURES, make_model, plain_outcome, train
from tests.helpers.simulation.transport import SimulatedRaceError

pytestmark = pytest.mark.gpu

WINDOWS = ("layer", 0, 2**20)
NUM_SEEDS = 3


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_late_copies(gpu: Device, architecture: str, window: str | int, seed: int) -> None:
    model = make_model(architecture, gpu)
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window=window, min_bytes=0)
    with attach(model, config, transport=gpu.slow_transport(seed)):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None


@pytest.mark.parametrize("window", WINDOWS)
def test_late_compute(gpu: Device, window: str | int) -> None:
    """The host runs far ahead of compute, so that every copy is queued long before its source."""
    model = make_model("gpt2", gpu)
    expected = plain_outcome(model, gpu)
    for layer in model.transformer.h:
        layer.register_forward_pre_hook(lambda *_: gpu.sleep(2.0))
        layer.mlp.act.register_full_backward_hook(lambda *_: gpu.sleep(2.0))
    config = PyAOConfig(policy="all", window=window, min_bytes=0)
    with attach(model, config, transport=gpu.transport()):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None


@pytest.mark.parametrize("window", WINDOWS)
def test_late_copies_and_late_compute(gpu: Device, window: str | int) -> None:
    model = make_model("llama", gpu)
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window=window, min_bytes=0)
    with attach(model, config, transport=gpu.slow_transport(11)):
        outcome = train(model, gpu, before_step=lambda: gpu.sleep(5.0))
    assert outcome.difference_from(expected) is None


def test_a_missing_wait_shows(gpu: Device) -> None:
    """The races above would be seen: an engine whose waits do nothing gives other gradients."""
    model = make_model("gpt2", gpu)
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window="layer", min_bytes=0)
    transport: Any = gpu.slow_transport(5, waits=False)
    try:
        with attach(model, config, transport=transport):
            outcome = train(model, gpu)
    except SimulatedRaceError:
        return  # the stand-in notices by itself
    assert outcome.difference_from(expected) is not None
