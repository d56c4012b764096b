"""The host pool: buffers never overlap, nothing is lost, the cap holds, failures are survived."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pyao import attach
from hf_pyao.engine.stores import HostPool
from hf_pyao.engine.stores.host_pool import HostBuffer
from hf_pyao.engine.stores.slabs import ALIGNMENT_BYTES, MIN_SLAB_BYTES
from tests.helpers import (
    EVERY_LAYER,
    assert_same_tensors,
    gradients_of,
    tiny_batch,
    tiny_model,
)
from tests.helpers.simulation.transport import SimulatedTransport

MIB = 2**20


@dataclass
class Copy:
    """A queued copy, as far as the pool looks at it."""

    queue: str
    order: int


def extent(buffer: HostBuffer) -> tuple[int, int, int]:
    return buffer.slab, buffer.offset, buffer.offset + buffer.data.numel()


def overlaps(one: HostBuffer, other: HostBuffer) -> bool:
    slab, start, end = extent(one)
    other_slab, other_start, other_end = extent(other)
    return slab == other_slab and start < other_end and other_start < end


# ---- buffers
# -----------------------------------------------------------------------------------------


@given(
    actions=st.lists(
        st.one_of(
            st.integers(1, 3 * MIB),  # acquire that many bytes
            st.integers(-50, -1),  # release one of those held
        ),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@pytest.mark.thorough
def test_any_order_of_acquiring_and_releasing(actions: Sequence[int]) -> None:
    pool = HostPool(2 * MIN_SLAB_BYTES, pin=False)
    held: list[HostBuffer] = []
    for action in actions:
        if action < 0 and held:
            pool.release(held.pop(action % len(held)))
        elif action > 0:
            buffer = pool.acquire(action)
            if buffer is None:
                assert sum(b.reserved_bytes for b in held) + action > MIN_SLAB_BYTES
                continue
            assert buffer.data.numel() == action
            assert buffer.data.dtype is torch.uint8
            assert buffer.data.data_ptr() % 64 == 0
            assert buffer.offset % ALIGNMENT_BYTES == 0
            assert not any(overlaps(buffer, other) for other in held)
            held.append(buffer)
        assert pool.settle() == pool.used_bytes == sum(b.reserved_bytes for b in held)
        assert pool.used_bytes <= pool.peak_used_bytes <= pool.pool_bytes <= pool.capacity_bytes
    for buffer in held:
        pool.release(buffer)
    assert pool.settle() == 0
    # Nothing is lost: all of it can be had again, in pieces as large as a slab.
    if pool.num_slab_allocations:
        num_slabs = pool.num_slab_allocations
        whole = [pool.acquire(MIN_SLAB_BYTES) for _ in range(num_slabs)]
        assert None not in whole
        assert pool.num_slab_allocations == num_slabs


def test_a_steady_state_allocates_nothing() -> None:
    pool = HostPool(256 * MIB, pin=False)
    for length in (7, 128, 33, 128, 7, 99) * 5:
        buffers = [pool.acquire(length * size) for size in (1024, 512, 4096, 1024)]
        for buffer in buffers:
            assert buffer is not None
            pool.release(buffer)
    assert pool.num_slab_allocations == 1
    assert pool.pool_bytes == MIN_SLAB_BYTES


def test_growth_is_in_powers_of_two_and_stops_at_the_cap() -> None:
    pool = HostPool(200 * MIB, pin=False)
    sizes = [pool.acquire(30 * MIB) for _ in range(8)]
    assert sizes.count(None) == 2, "six fit into 32 + 32 + 64 MiB, and the 72 that are left"
    assert pool.pool_bytes == 200 * MIB
    assert pool.num_slab_allocations == 4
    other = HostPool(10**12, pin=False)
    other.acquire(33 * MIB)
    assert other.pool_bytes == 64 * MIB, "pinned memory is rounded up to a power of two anyway"


def test_the_newest_copy_of_each_queue_stands_for_the_others() -> None:
    pool = HostPool(64 * MIB, pin=False)
    for after in (Copy("a", 3), None, Copy("b", 1), Copy("a", 2), Copy("b", 7)):
        buffer = pool.acquire(100)
        assert buffer is not None
        pool.release(buffer, after)
    pool.settle()
    assert sorted((c.queue, c.order) for c in pool.barriers) == [("a", 3), ("b", 7)]


def test_queues_of_two_transports_that_look_alike_are_two() -> None:
    """Two models with one pool: neither's copies stand for the other's."""
    pool = HostPool(64 * MIB, pin=False)
    tickets = []
    for order in (9, 1):
        transport = SimulatedTransport()
        source, target = torch.zeros(8), torch.zeros(8)
        for _ in range(order):
            ticket = transport.offload(source, target)
        transport.finish()
        tickets.append(ticket)
        buffer = pool.acquire(100)
        assert buffer is not None
        pool.release(buffer, ticket)
    assert tickets[0].queue == tickets[1].queue, "they do not look alike"
    pool.settle()
    assert set(pool.barriers) == set(tickets)


def test_threads_never_get_the_same_bytes() -> None:
    pool = HostPool(64 * MIB, pin=False)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[HostBuffer] = []
        for _ in range(300):
            if len(held) > 4:
                buffer = held.pop(0)
                if not bool((buffer.data == seed).all()):
                    failures.append(f"thread {seed}: bytes were overwritten")
                pool.release(buffer)
            nbytes = int(torch.randint(1, 9, (1,), generator=generator)) * 100
            new = pool.acquire(nbytes)
            if new is None:
                failures.append("full")
                return
            new.data.fill_(seed)
            held.append(new)
        for buffer in held:
            pool.release(buffer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.settle() == 0
    assert pool.num_slab_allocations == 1


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        buffer = HostPool(64 * MIB, pin=False).acquire(100)
    assert buffer is not None
    assert buffer.data.device.type == "cpu"


# ---- when memory runs out
# ----------------------------------------------------------------------------


def test_a_full_pool_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(MIB, pin=False)
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        assert pool.acquire(2 * MIB) is None
        held = pool.acquire(MIB)
        assert held is not None
        assert pool.acquire(1) is None
    (record,) = caplog.records
    assert "host memory for saved tensors is full" in record.getMessage()
    assert "host_memory_gib" in record.getMessage()


class Machine:
    """Stands in for torch.empty: gives no piece of memory larger than it has."""

    def __init__(self, *, pinned: int = 10**18, pageable: int = 10**18) -> None:
        self.largest = {True: pinned, False: pageable}
        self.asked: list[tuple[bool, int]] = []
        self._empty = torch.empty

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        (nbytes,) = args
        self.asked.append((pin_memory, nbytes))
        if nbytes > self.largest[pin_memory]:
            raise RuntimeError("CUDA error: out of memory\nand many more lines")
        return self._empty(*args, **kwargs)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch, "empty", machine.empty)
    return machine


def test_memory_that_cannot_be_pinned_is_used_pageable(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.largest[True] = 0
    pool = HostPool(256 * MIB, pin=True)
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        assert pool.acquire(MIB) is not None
        num_asked = len(machine.asked)
        assert pool.acquire(40 * MIB) is not None
    assert machine.asked[num_asked:] == [(False, 64 * MIB)], "pinning is tried for one slab"
    assert not pool.pin
    (record,) = caplog.records
    assert "cannot pin" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    assert "many more lines" not in record.getMessage()


@pytest.mark.parametrize("pin", [True, False])
def test_a_slab_that_is_refused_is_tried_smaller(
    pin: bool, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool(10**12, pin=pin)
    held: list[HostBuffer | None] = []
    held.append(pool.acquire(512 * MIB))
    machine.largest[pin] = 70 * MIB
    machine.asked.clear()
    with caplog.at_level(logging.WARNING, "hf_pyao"):
        held.append(pool.acquire(3 * MIB))
        assert machine.asked == [(pin, size * MIB) for size in (512, 256, 128, 64)]
        machine.asked.clear()
        held.append(pool.acquire(62 * MIB))
        assert machine.asked == [(pin, 64 * MIB)], "no size is tried again that was refused"
        machine.asked.clear()
        held.append(pool.acquire(70 * MIB))
        assert machine.asked == [(pin, 128 * MIB), (pin, 70 * MIB)], "down to what was asked for"
    assert pool.pin is pin
    assert pool.pool_bytes == (512 + 64 + 64 + 70) * MIB
    (record,) = caplog.records
    assert "refused 0.500 GiB of host memory in one piece" in record.getMessage()
    assert "pieces of 0.062 GiB" in record.getMessage()
    assert "many more lines" not in record.getMessage()
    assert None not in held


@pytest.mark.parametrize("window", ["layer", 4096])
def test_what_finds_no_room_stays_on_the_device(
    window: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    batch = tiny_batch()
    plain = copy.deepcopy(model)
    plain(**batch, use_cache=False).loss.backward()
    config = replace(EVERY_LAYER, window=window)
    for room in (0, 20_000, 50_000):
        pool = HostPool(room, pin=False)
        with (
            attach(model, config, host_pool=pool) as offloader,
            caplog.at_level(logging.WARNING, "hf_pyao"),
        ):
            for _ in range(2):
                model.zero_grad()
                model(**batch, use_cache=False).loss.backward()
            assert_same_tensors(gradients_of(model), gradients_of(plain), f"{room} bytes")
            metrics = offloader.metrics()
            assert metrics["kept_bytes/host memory full"] > 0
            assert (metrics["offloaded_bytes"] > 0) == (room > 0)
            assert metrics["would_hold_bytes"] == metrics["held_bytes"] + metrics["offloaded_bytes"]
            assert metrics["host_peak_bytes"] <= metrics["pool_bytes"] <= room
        assert pool.settle() == 0
        told = [record for record in caplog.records if "is full" in record.getMessage()]
        assert len(told) == 1
        caplog.clear()


# ---- memory apart from slabs ---------------------------------------------------------------------


class Registering:
    """Stands for the part of the CUDA runtime that page-locks memory which is there."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("nbytes", [512 * 3, 33 * 2**20 + 512, 2**20])
def test_reserved_memory_is_page_locked_at_its_exact_size(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Registering()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = HostPool(2**26, pin=True)
    memory = pool.reserve(nbytes)
    assert memory is not None
    assert memory.untyped_storage().nbytes() == nbytes
    assert runtime.registered == {memory.data_ptr(): nbytes}
    assert pool.capacity_bytes == 2**26 - nbytes
    del memory
    assert runtime.registered == {}
    assert pool.room_to_reserve() == 2**26, "memory that is gone does not count"


def test_memory_that_cannot_be_page_locked_is_pageable_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Registering(error=2))
    pool = HostPool(2**20, pin=True)
    assert pool.reserve(4096) is not None
    assert "cudaHostRegister: error 2" in caplog.text
    assert not pool.page_lock(torch.empty(512, dtype=torch.uint8))


def test_memory_is_counted_once_and_until_it_is_returned_or_gone() -> None:
    pool = HostPool(4096, pin=False)
    first = pool.reserve(2048)
    assert first is not None
    assert pool.count_in(first, 2048)
    other = torch.empty(1024, dtype=torch.uint8)
    assert pool.count_in(other, 1024)
    assert pool.count_in(other, 1024)
    assert pool.room_to_reserve() == 1024
    assert pool.reserve(1025) is None
    assert not pool.count_in(torch.empty(2048, dtype=torch.uint8), 2048)
    assert pool.return_reserved(first) == 2048
    assert pool.return_reserved(first) == 0
    del other
    assert pool.room_to_reserve() == 4096
