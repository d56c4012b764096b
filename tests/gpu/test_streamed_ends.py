"""Embeddings and head on the host of a device: the bits of a resident run, and what it holds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from tests.gpu.device import Device
from tests.gpu.test_streamed_weights import frozen_bits, lora
from tests.gpu.training import ARCHITECTURES, batch_of, train
from tests.helpers.adapters import cast_base_

pytestmark = pytest.mark.gpu


def ends_on_host(model: nn.Module, gpu: Device, **settings: Any) -> Offloader:
    settings = {
        "stream_weights": 0,
        "stream_embeddings": "on",
        "min_bytes": 0,
        "policy": "all",
        "host_memory_gib": 0.5,
        **settings,
    }
    return attach(model, PyAOConfig(**settings), transport=gpu.transport(), device=gpu.torch_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_loss", ["off", "chunked"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradients_and_rng_are_equal(
    gpu: Device, architecture: str, head_loss: str, dtype: torch.dtype
) -> None:
    model = lora(architecture, dtype)
    resident = copy.deepcopy(model).to(gpu.torch_device)
    with attach(resident, PyAOConfig(policy="off", head_loss=head_loss), transport=gpu.transport()):
        expected = train(resident, gpu)
    before = frozen_bits(model)
    with ends_on_host(model, gpu, head_loss=head_loss) as offloader:
        for _ in range(2):
            assert train(model, gpu).difference_from(expected) is None
        assert offloader.weights is not None
        figures = offloader.weights.figures()["embeddings_and_head"]
        assert figures["num_uploads"] > 0
        assert figures["gathered_rows"] > 0
        assert figures["num_left"] == 0
    gpu.finish()
    after = frozen_bits(model)
    assert all(torch.equal(after[name], bits) for name, bits in before.items())


def test_autocast_gives_the_same(gpu: Device) -> None:
    device_type = gpu.torch_device.type
    model = cast_base_(lora("llama"), torch.bfloat16)
    resident = copy.deepcopy(model).to(gpu.torch_device)
    with torch.autocast(device_type, torch.bfloat16):
        expected = train(resident, gpu)
    with ends_on_host(model, gpu), torch.autocast(device_type, torch.bfloat16):
        assert train(model, gpu).difference_from(expected) is None


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_model_is_on_the_device_for_whoever_asks(gpu: Device, architecture: str) -> None:
    model: Any = lora(architecture).eval()
    resident = copy.deepcopy(model).to(gpu.torch_device)
    batch = batch_of(gpu, 16)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = resident.generate(input_ids=batch["input_ids"], **options)
    kind = type(model.base_model.model)
    with ends_on_host(model, gpu):
        assert model.device == gpu.torch_device
        assert model.base_model.model.device == gpu.torch_device
        inner = model.base_model.model
        assert next(inner.get_input_embeddings().parameters()).device.type == "cpu"
        tokens = model.generate(input_ids=batch["input_ids"], **options)
        assert torch.equal(tokens, expected)
        assert isinstance(inner, kind)
        twin = copy.deepcopy(inner)
        assert type(twin) is kind
        assert type(pickle.loads(pickle.dumps(inner))) is kind
        hidden = inner.get_input_embeddings()(batch["input_ids"])
        assert hidden.device == gpu.torch_device
        assert inner.lm_head(hidden).device == gpu.torch_device
        model.to(gpu.torch_device)
        assert next(inner.get_input_embeddings().parameters()).device.type == "cpu"
    assert type(model.base_model.model) is kind


def test_the_device_holds_neither_between_steps(gpu: Device) -> None:
    """By the device's own allocator."""
    if gpu.torch_device.type == "cpu":
        pytest.skip("the stand-in has no allocator of its own")
    model = lora("llama")
    inner: Any = model
    whole_bytes = sum(p.nbytes for p in model.parameters())
    ends_bytes = sum(
        each.weight.nbytes
        for each in (inner.base_model.model.lm_head, inner.base_model.model.model.embed_tokens)
    )
    offloaders: list[Offloader] = []
    left_bytes, _ = gpu.left_allocated(
        lambda: offloaders.append(ends_on_host(model, gpu, policy="off", stream_weights=99))
    )
    assert left_bytes <= (whole_bytes - ends_bytes) * 1.1
    batch = batch_of(gpu, 64)
    model(**batch).loss.backward()
    loss: list[torch.Tensor] = []
    held_bytes, _ = gpu.left_allocated(lambda: loss.append(model(**batch).loss))
    loss.pop().backward()
    again_bytes, _ = gpu.left_allocated(lambda: model(**batch).loss.backward())
    assert again_bytes < ends_bytes / 8
    offloaders[0].detach()
    resident = copy.deepcopy(model).to(gpu.torch_device)
    resident(**batch).loss.backward()
    resident_bytes, _ = gpu.left_allocated(lambda: loss.append(resident(**batch).loss))
    assert held_bytes <= resident_bytes
