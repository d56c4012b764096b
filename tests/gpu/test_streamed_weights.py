"""Streamed weights on the device: the bits of a resident run, and what the device holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from tests.gpu.device import Device, StandIn
from tests.gpu.training import ARCHITECTURES, batch_of, make_model, train
from tests.helpers.adapters import cast_base_, with_adapters

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"policy": "all"},
    "nothing offloaded": {"policy": "off"},
    "layer": {"policy": "all", "window": "layer", "keep_last_layers": 0},
    "small window": {"policy": "all", "window": 2**16, "keep_last_layers": 0},
    "segments": {"policy": "all", "checkpoint_every": 2},
    "one layer stays": {"policy": "all", "stream_weights": 1},
}


def lora(architecture: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small model on the host, with adapters that have dropout."""
    return with_adapters(make_model(architecture, StandIn(), dtype), r=4, lora_dropout=0.1)


def streamed(model: nn.Module, gpu: Device, **settings: Any) -> Offloader:
    settings = {"stream_weights": 0, "min_bytes": 0, "host_memory_gib": 0.5, **settings}
    return attach(model, PyAOConfig(**settings), transport=gpu.transport(), device=gpu.torch_device)


def frozen_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradients_and_rng_are_equal(
    gpu: Device, architecture: str, settings: str, dtype: torch.dtype
) -> None:
    model = lora(architecture, dtype)
    expected = train(copy.deepcopy(model).to(gpu.torch_device), gpu)
    before = frozen_bits(model)
    with streamed(model, gpu, **SETTINGS[settings]) as offloader:
        for _ in range(2):  # the second time the ring holds what the first one left
            assert train(model, gpu).difference_from(expected) is None
        assert offloader.weights is not None
        ring = offloader.weights.ring
        assert ring is not None
        assert ring.num_uploads > 2 * ring.num_blocks
        assert ring.counts.num_left == 0
    gpu.finish()
    after = frozen_bits(model)
    assert all(torch.equal(after[name], bits) for name, bits in before.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_the_same(gpu: Device, dtype: torch.dtype) -> None:
    device_type = gpu.torch_device.type
    if device_type == "cpu" and dtype == torch.float16:
        dtype = torch.bfloat16
    model = cast_base_(lora("llama"), dtype)
    resident = copy.deepcopy(model).to(gpu.torch_device)
    with torch.autocast(device_type, dtype):
        expected = train(resident, gpu)
    with streamed(model, gpu, policy="all"), torch.autocast(device_type, dtype):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_checkpointing_gives_the_same(gpu: Device, use_reentrant: bool) -> None:
    model = lora("llama")
    inner: Any = model
    inner.enable_input_require_grads()
    inner.base_model.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    expected = train(copy.deepcopy(model).to(gpu.torch_device), gpu)
    with streamed(model, gpu, policy="all"):
        outcome = train(model, gpu)
    assert outcome.difference_from(expected) is None


def test_the_device_holds_two_blocks_and_the_graph_none(gpu: Device) -> None:
    """By the device's own allocator."""
    if gpu.torch_device.type == "cpu":
        pytest.skip("the stand-in has no allocator of its own")
    model = lora("llama")
    batch = batch_of(gpu, 64)

    def bytes_of_graph(each: nn.Module) -> int:
        loss: list[torch.Tensor] = []

        def forward() -> None:
            loss.append(each(**batch).loss)

        forward()
        loss.pop().backward()
        each.zero_grad()
        nbytes, _ = gpu.left_allocated(forward)
        loss.pop().backward()
        each.zero_grad()
        return nbytes

    resident_bytes = bytes_of_graph(copy.deepcopy(model).to(gpu.torch_device))
    whole_bytes = sum(p.nbytes for p in model.parameters())
    offloaders: list[Offloader] = []
    left_bytes, _ = gpu.left_allocated(
        lambda: offloaders.append(streamed(model, gpu, policy="off"))
    )
    (offloader,) = offloaders
    assert offloader.weights is not None
    streamed_bytes = offloader.weights.nbytes
    assert streamed_bytes > whole_bytes / 2
    assert left_bytes <= (whole_bytes - streamed_bytes) * 1.1
    # What is allocated for the ring is there since the forward before.
    assert bytes_of_graph(model) <= resident_bytes
    ring = offloader.weights.ring
    assert ring is not None
    assert len([slot for slot in ring.slots if slot is not None]) == 2
    offloader.detach()
    gpu.finish()
    masters = [weight.ref() for block in ring.blocks for weight in block.weights]
    assert {each.device.type for each in masters if each is not None} == {"cpu"}


@pytest.fixture
def process_group(gpu: Device) -> Iterator[None]:
    """Two ranks, of which the other one is imagined: its gradients are zero."""
    devices = {"cpu", gpu.torch_device.type}
    backend = ",".join(f"{each}:fake" for each in sorted(devices))
    dist.init_process_group(backend, store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("when", ["before", "after"])
def test_under_ddp(gpu: Device, process_group: None, when: str) -> None:
    def half(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        mean.set_result(bucket.buffer().div_(2))
        return mean

    half.__annotations__.clear()  # they are strings here, which DDP refuses

    def wrapped(each: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(each)
        ddp.register_comm_hook(None, half)
        return ddp

    model = lora("llama")
    resident = wrapped(copy.deepcopy(model).to(gpu.torch_device))
    expected = train(resident, gpu)
    if when == "before":
        offloader = streamed(model, gpu, policy="all")
        ddp = wrapped(model)
    else:
        ddp = wrapped(model.to(gpu.torch_device))
        offloader = streamed(ddp, gpu, policy="all")
    with offloader:
        for _ in range(2):
            assert train(ddp, gpu).difference_from(expected) is None
