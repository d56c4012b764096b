"""Tiers: a further place for bytes is a store of its own, and nothing else knows which tier it is."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_pyao import attach
from hf_pyao.engine.stores import HOST_FULL, HostPool, Store
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.engine.transfer.transport import BlockingTransport, Transport
from tests.engine.stores.shared_memory import SharedMemoryStore
from tests.helpers import (
    EVERYTHING,
    MAIN,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)
from tests.helpers.simulation.transport import SimulatedTicket, SimulatedTransport

WINDOW_BYTES = 4096
CONFIG = replace(EVERYTHING, window=WINDOW_BYTES)


def gradients_after(model: nn.Module, num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Return the sum of the gradients of several steps: buffers are used again."""
    for seed in range(num_steps):
        model(**tiny_batch(seed)).loss.backward()
    return gradients_of(model)


class OwnCopies(SimulatedTransport):
    """Takes its own tickets alone."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tickets: set[int] = set()
        self.kept: list[SimulatedTicket] = []
        """So that ids stay unique."""

    def _issued(self, ticket: SimulatedTicket) -> SimulatedTicket:
        self.tickets.add(id(ticket))
        self.kept.append(ticket)
        return super()._issued(ticket)

    def wait(self, ticket: SimulatedTicket) -> None:
        assert id(ticket) in self.tickets
        super().wait(ticket)

    def retire(self, ticket: SimulatedTicket) -> None:
        assert id(ticket) in self.tickets
        super().retire(ticket)

    def is_done(self, ticket: SimulatedTicket) -> bool:
        assert id(ticket) in self.tickets
        return super().is_done(ticket)


def link_of(transport: Transport, *stores: Store, second: Transport | None = None) -> LinkContext:
    first, *others = stores
    tiers = [Tier(store, second or transport) for store in others]
    return LinkContext(transport, first, WINDOW_BYTES, tiers)


@pytest.mark.parametrize("model_type", MAIN)
def test_bytes_in_shared_memory_train_the_same(model_type: str) -> None:
    model = tiny_model(model_type)
    expected = gradients_after(copy.deepcopy(model))
    store = SharedMemoryStore(2**26)
    with attach(model, CONFIG, host_pool=store) as offloader:
        found = gradients_after(model)
        totals = offloader.totals()
        assert totals["offloaded_bytes"] == totals["reloaded_bytes"] > 0
        assert offloader.metrics()["host_peak_bytes"] > 0
        assert offloader.metrics()["pool_bytes"] == store.pool_bytes > 0
        assert "at most 0.1 GiB" in offloader.describe()
        assert store.settle() == 0
    assert_same_tensors(found, expected, "gradients")


@pytest.mark.parametrize("model_type", MAIN)
@pytest.mark.parametrize("has_own_transport", [False, True])
def test_what_the_first_tier_has_no_room_for_goes_to_the_next(
    model_type: str, has_own_transport: bool
) -> None:
    """The schedules are hostile: each tier's copies are waited for where its bytes are used."""
    origin = tiny_model(model_type)
    expected = gradients_after(copy.deepcopy(origin))
    for seed in range(4):
        model = copy.deepcopy(origin)
        first, second = OwnCopies(seed), OwnCopies(seed + 100)
        pool, behind = HostPool(2**13, pin=False), SharedMemoryStore(2**26)
        own = second if has_own_transport else None
        link = link_of(first, pool, behind, second=own)
        with attach(model, CONFIG, link=link) as offloader:
            found = gradients_after(model)
            totals = offloader.totals()
            assert totals.get(f"kept_bytes/{HOST_FULL}", 0) == 0
            assert totals["offloaded_bytes"] >= totals["reloaded_bytes"] > 0
            assert offloader.metrics()["host_peak_bytes"] > 2**13
            assert offloader.metrics()["pool_bytes"] == pool.pool_bytes + behind.pool_bytes
            assert [store.settle() for store in link.tiers.stores] == [0, 0]
            assert link.tiers.capacity_bytes == 2**13 + 2**26
        assert_same_tensors(found, expected, f"seed {seed}")
        first.finish()
        second.finish()
        assert not first.violations and not second.violations
        num_copies = [sum(transport.num_copies.values()) for transport in (first, second)]
        assert num_copies[0] > 0
        assert (num_copies[1] > 0) == has_own_transport
        assert pool.pool_bytes > 0 and behind.pool_bytes > 0


def test_without_room_in_any_tier_bytes_stay() -> None:
    model = tiny_model("llama")
    expected = gradients_after(copy.deepcopy(model))
    with attach(copy_of_it := copy.deepcopy(model), CONFIG) as offloader:
        gradients_after(copy_of_it)
        movable_bytes = offloader.totals()["offloaded_bytes"]
    link = link_of(BlockingTransport(), HostPool(0, pin=False), SharedMemoryStore(0))
    with attach(model, CONFIG, link=link) as offloader:
        found = gradients_after(model)
        totals = offloader.totals()
        assert totals["offloaded_bytes"] == 0
        assert totals[f"kept_bytes/{HOST_FULL}"] == movable_bytes > 0
    assert_same_tensors(found, expected, "gradients")


def test_what_tiers_have_together() -> None:
    pool, shared = HostPool(2**20, pin=False), SharedMemoryStore(2**16)
    tiers = link_of(BlockingTransport(), pool, shared).tiers
    kept = [pool.acquire(1000), shared.acquire(500)]
    assert all(buffer is not None for buffer in kept)
    assert tiers.used_bytes == 1024 + 500
    assert tiers.pool_bytes == pool.pool_bytes + 500
    assert tiers.pinned_bytes == 0
    assert tiers.has_room(2**20 - 1024 + 2**16 - 500)
    assert not tiers.has_room(2**20 - 1024 + 2**16 - 500 + 1)
    assert tiers.names() == "host memory, then shared memory"
    for buffer in kept:
        assert buffer is not None
        assert tiers.owns(buffer.data.untyped_storage())
    assert not tiers.owns(torch.empty(8).untyped_storage())
