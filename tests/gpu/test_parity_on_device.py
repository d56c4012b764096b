"""On the device, with deterministic kernels: the same bits with and without offloading."""

from __future__ import annotations

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from tests.gpu.device import Device
from tests.gpu.training import ARCHITECTURES, make_model, plain_outcome, train

pytestmark = pytest.mark.gpu

WINDOWS = ("layer", 0, 2**20, 2**30)


def test_two_plain_runs_are_equal(gpu: Device) -> None:
    """What the other tests rest on: the kernels are deterministic."""
    model = make_model("gpt2", gpu)
    assert plain_outcome(model, gpu).difference_from(plain_outcome(model, gpu)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradients_and_rng_are_equal(
    gpu: Device, architecture: str, window: str | int, dtype: torch.dtype
) -> None:
    model = make_model(architecture, gpu, dtype)
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window=window, min_bytes=0)
    with attach(model, config, transport=gpu.transport()) as offloader:
        outcome = train(model, gpu)
        assert offloader.metrics()["offloaded_bytes"] > 2**20
    assert outcome.difference_from(expected) is None


@pytest.mark.parametrize("copy_streams", [0, 1, 2])
def test_any_number_of_copy_streams_gives_the_same(gpu: Device, copy_streams: int) -> None:
    model = make_model("llama", gpu)
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window=2**20, min_bytes=0)
    with attach(model, config, transport=gpu.transport(copy_streams)):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None


def test_the_default_transport_of_the_device_gives_the_same(gpu: Device) -> None:
    model = make_model("opt", gpu)
    expected = plain_outcome(model, gpu)
    with attach(model, PyAOConfig(policy="all", min_bytes=0)) as offloader:
        outcome = train(model, gpu)
        metrics = offloader.metrics()
    assert outcome.difference_from(expected) is None
    # What has not left when backward reads it is read where it is: how much depends on the link.
    assert 0 < metrics["reloaded_bytes"] <= metrics["offloaded_bytes"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_layer_inputs_under_checkpointing(gpu: Device) -> None:
    model = make_model("llama", gpu)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window="layer", min_bytes=0)
    with attach(model, config, transport=gpu.transport()) as offloader:
        outcome = train(model, gpu)
        assert offloader.metrics()["offloaded_bytes"] > 0
    assert outcome.difference_from(expected) is None


def test_autocast_gives_the_same(gpu: Device) -> None:
    model = make_model("llama", gpu)
    device_type = gpu.torch_device.type
    with torch.autocast(device_type, torch.bfloat16):
        expected = plain_outcome(model, gpu)
    config = PyAOConfig(policy="all", window=2**20, min_bytes=0)
    with (
        attach(model, config, transport=gpu.transport()),
        torch.autocast(device_type, torch.bfloat16),
    ):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None
