"""Streamed weights that stay where they lie: streamed before, or shared with other processes."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import HostPool
from hf_pyao.engine.transfer.transport import BlockingTransport
from hf_pyao.errors import ConflictError
from hf_pyao.model.weights.shared_weights import adopt, share
from tests.engine.weights.test_host_bytes import streamed_bytes
from tests.engine.weights.test_streaming import NUM_LAYERS, llama, loss_of, ring_of
from tests.helpers import gradients_of, tiny_model
from tests.helpers.adapters import with_adapters

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name")


def shared(num_processes: int) -> nn.Module:
    """Return what :func:`llama` does; the base is shared before adapters are added."""
    base = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
    share(base, num_processes)
    return with_adapters(base)


def streamed_from(model: nn.Module, pool: HostPool, **more: Any) -> Any:
    return attach(model, PyAOConfig(policy="off", stream_weights=0), host_pool=pool, **more)


def same_gradients(model: nn.Module, plain: nn.Module) -> bool:
    for each in (model, plain):
        each.zero_grad()
        loss_of(each).backward()
    found = gradients_of(model)
    return all(torch.equal(found[n], g) for n, g in gradients_of(plain).items())


def addresses(model: nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters() if not p.requires_grad and p.dim() > 1]


def test_attaching_again_copies_nothing_and_counts_the_weights_once() -> None:
    model, plain = llama(), llama()
    pool = HostPool(streamed_bytes(), pin=False)
    with streamed_from(model, pool):
        loss_of(model).backward()
        places = addresses(model)
    for _ in range(2):
        with streamed_from(model, pool) as offloader:
            assert addresses(model) == places
            assert pool.room_to_reserve() < 512 * 100
            assert same_gradients(model, plain)
            assert ring_of(offloader).num_uploads > 0


def third_projection(model: nn.Module) -> Any:
    named = dict(model.named_modules())
    return next(m for n, m in named.items() if n.endswith("layers.2.self_attn.q_proj.base_layer"))


class PinnedPool(HostPool):
    """Says that its memory is page-locked, and notes what else is to be."""

    def __init__(self, *, can_lock: bool = True) -> None:
        super().__init__(2**26, pin=False)
        self.can_lock = can_lock
        self.locked: list[torch.Tensor] = []

    @property
    def is_pinned(self) -> bool:
        return True

    def page_lock(self, memory: torch.Tensor) -> bool:
        self.locked.append(memory)
        return self.can_lock


class NotingSources(BlockingTransport):
    """Notes from where uploads read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def reload(self, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> Any:
        self.read.append(src.data_ptr())
        return super().reload(src, dst, **options)

    def read_from(self, memories: list[torch.Tensor]) -> list[bool]:
        """Say of each upload since the last call whether it read one of *memories*."""
        found = [
            any(m.data_ptr() <= a < m.data_ptr() + m.numel() for m in memories) for a in self.read
        ]
        self.read.clear()
        return found


@on_linux
def test_uploads_read_a_page_locked_mapping_until_the_process_writes() -> None:
    model, plain = shared(2), llama()
    pool, transport = PinnedPool(), NotingSources()
    with streamed_from(model, pool, transport=transport) as offloader:
        assert "in one copy for 2 processes" in offloader.describe()
        assert len(pool.locked) == len(ring_of(offloader).blocks)
        assert all(memory.untyped_storage().nbytes() == memory.numel() for memory in pool.locked)
        for _ in range(2):
            assert same_gradients(model, plain)
        reads = transport.read_from(pool.locked)
        assert reads
        assert all(reads)
        for each in (model, plain):
            module = third_projection(each)
            assert module.weight.shape  # a look from outside, which changes nothing
        assert same_gradients(model, plain)
        assert all(transport.read_from(pool.locked))
        for each in (model, plain):
            module = third_projection(each)
            module.weight.data[0, 0] += 1
        assert same_gradients(model, plain)
        reads = transport.read_from(pool.locked)
        assert True in reads, "other layers are as they were"
        assert False in reads, "this process's own"
    assert same_gradients(model, plain)


@on_linux
def test_where_nothing_can_be_page_locked_the_process_has_its_own_copy() -> None:
    model, plain = shared(2), llama()
    places = addresses(model)
    with streamed_from(model, PinnedPool(can_lock=False)) as offloader:
        assert "in one copy" not in offloader.describe()
        assert not set(addresses(model)) & set(places[1:3])
        assert same_gradients(model, plain)


@on_linux
def test_shared_weights_count_by_the_part_of_each_process() -> None:
    model = shared(4)
    needed = streamed_bytes()
    pool = HostPool(needed, pin=False)
    with streamed_from(model, pool):
        assert needed * 0.74 < pool.room_to_reserve() < needed * 0.76


@on_linux
def test_a_copy_of_a_shared_model_shares_nothing_and_what_one_writes_the_other_does_not_see() -> (
    None
):
    model = tiny_model("llama", tie_word_embeddings=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    description = share(model, 2)
    with torch.device("meta"):
        other = tiny_model("llama", tie_word_embeddings=True)
    adopt(other, description, 2)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    for each in (model, other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        state = each.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert torch.equal(other.lm_head.weight, before["lm_head.weight"] + 1)


@on_linux
def test_what_cannot_be_shared_is_refused_before_anything_moves() -> None:
    model = tiny_model("llama")
    layers: Any = model.model.layers
    layers[1].mlp.up_proj.weight = nn.Parameter(layers[0].mlp.up_proj.weight.detach())
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ConflictError, match="two tensors over the same bytes"):
        share(model, 2)
    with pytest.raises(ConflictError, match="meta"):
        share(tiny_model("llama").to("meta"), 2)
    assert [p.data_ptr() for p in model.parameters()] == places
