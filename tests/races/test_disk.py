"""Bytes on a disk stay the same under late, reordered, torn and failing accesses."""

from __future__ import annotations

import errno
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_pyao.engine.codecs import get_codec
from hf_pyao.engine.stores import HostPool, nameless_file
from hf_pyao.engine.stores import disk_store as store_module
from hf_pyao.engine.stores.disk_figures import WriteLimit
from hf_pyao.engine.stores.disk_range import DiskRange, Phase
from hf_pyao.engine.stores.disk_store import DiskStore
from hf_pyao.engine.stores.nameless_file import NamelessFile
from hf_pyao.engine.stores.raw_bytes import raw_bytes
from hf_pyao.engine.transfer.disk_transport import DiskTransport
from hf_pyao.engine.transfer.layout import TensorLayout
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.mover import MovedBytes, Mover
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.errors import DiskError, PyAOError
from hf_pyao.metrics import MicroBatchStats
from tests.helpers.simulation.disk import Failures, SimulatedDisk, SimulatedLanes
from tests.helpers.simulation.transport import SimulatedRaceError, SimulatedTransport

PAGE = 4096
NUM_SCHEDULES = 500


@dataclass
class Name:
    layer: str

    def __str__(self) -> str:
        return f"tensor {self.layer}"


class Bench:
    """A mover over a small disk that is simulated."""

    def __init__(self, seed: int, folder: Path, fail: Failures | None = None) -> None:
        self.random = random.Random(seed)
        self.transport = SimulatedTransport(seed)
        self.lanes = SimulatedLanes(seed)
        self.disk = SimulatedDisk(self.lanes, seed, fail)
        self.file = NamelessFile(folder, self.disk)
        with mock.patch.object(store_module, "GROWTH_BYTES", 4 * PAGE):
            self.store = DiskStore(
                self.file,
                64 * PAGE,
                WriteLimit(10**9),
                make_memory=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
                is_done=self.transport.is_done,
                await_copy=self.transport.await_on_host,
                memory_bytes=self.random.choice((2, 3, 8)) * PAGE,
                lanes=self.lanes,
            )
        behind = Tier(self.store, DiskTransport(self.transport, self.store))
        self.link = LinkContext(self.transport, HostPool(0, pin=False), 2 * PAGE, [behind])
        self.mover = Mover(self.link)
        self.meter = MicroBatchStats()
        self.codec = get_codec("identity")

    def forward(self, number: int, count: int) -> list[tuple[MovedBytes | None, torch.Tensor]]:
        """Move some tensors away; return them with what they held."""
        moved: list[tuple[MovedBytes | None, torch.Tensor]] = []
        for index in range(count):
            nbytes = self.random.choice((100, PAGE, 5000, 2 * PAGE))
            seed = self.random.randrange(2**30)
            generator = torch.Generator().manual_seed(seed)
            content = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
            source = content.clone()
            layout = TensorLayout(source)
            name = Name(f"{number}.{index}")
            one = MovedBytes(self.mover, source, layout, nbytes, name, self.meter)
            is_moved = self.mover.offload(one, self.codec)
            moved.append((one if is_moved else None, content))
        return moved

    def backward(self, moved: list[tuple[MovedBytes | None, torch.Tensor]]) -> None:
        """Ask for the tensors, the newest first, and compare."""
        while moved:
            one, content = moved.pop()
            if one is None:
                continue  # it stayed
            if self.random.random() < 0.1:
                continue  # no one asks for it
            for _ in range(2 if self.random.random() < 0.1 else 1):
                found = one.layout.view_of(*self.mover.read(one))
                assert torch.equal(found, content), "other bytes came back"
                del found
                self.mover.drop_device_copy(one)

    def end(self) -> None:
        """Let all end; nothing is held then."""
        self.transport.finish()
        self.lanes.close()
        assert self.store.settle() == 0
        assert not self.transport.violations
        held = sum(size for _, size in self.store._space.free)
        assert held == self.file.nbytes
        self.store.memory._free_retired()
        assert self.store.memory._taken_bytes == 0
        self.file.close()


def run(seed: int, folder: Path, fail: Failures | None = None) -> Bench:
    bench = Bench(seed, folder, fail)
    try:
        if seed % 3 == 0:  # two forwards before the first backward, the newest first or the oldest
            waiting = [bench.forward(0, 4), bench.forward(1, 4)]
            for number in (1, 0) if seed % 2 else (0, 1):
                bench.backward(waiting[number])
        else:
            for number in range(2):
                bench.backward(bench.forward(number, 5))
    finally:
        bench.lanes.close()
    bench.end()
    return bench


def test_bytes_are_the_same_under_500_schedules(tmp_path: Path) -> None:
    seen = defaultdict(int)
    for seed in range(NUM_SCHEDULES):
        figures = run(seed, tmp_path).store.figures
        for name in ("written_bytes", "read_bytes", "forwarded_bytes"):
            seen[name] += getattr(figures, name)
        assert figures.num_retries == 0
    assert min(seen.values()) > NUM_SCHEDULES * PAGE, seen
    assert not list(tmp_path.iterdir())


FAULTS = ("write", "writes", "read", "reads", "full", "damaged", "lost", "read-only")


def failures(kind: str, at: int) -> Failures:
    """Return what fails: the access of number *at*, or those from it on."""

    def fail(access: str, number: int) -> int:
        if kind == "full":
            return errno.ENOSPC if access == "allocate" and number >= at else 0
        if kind == "read-only":
            return errno.EROFS if access != "read" and number >= at else 0
        if kind in ("damaged", "lost"):
            return -1 if access == "read" and (number == at or kind == "lost") else 0
        is_due = number >= at if kind.endswith("s") else number == at
        return errno.EIO if is_due and access == kind.removesuffix("s") else 0

    return fail


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_at_100_points(kind: str, tmp_path: Path) -> None:
    errors = []
    for point in range(100):
        try:
            run(point, tmp_path, failures(kind, point % 25))
        except DiskError as error:
            errors.append(str(error))
    assert bool(errors) == (kind in ("reads", "lost")), errors
    assert all(f"{tmp_path}/activations-" in error for error in errors)
    assert not list(tmp_path.iterdir())


@contextmanager
def _forward_from_a_half_written_range() -> Iterator[None]:
    """What is being written is read back from the file."""

    def bring(self: DiskStore, held: DiskRange) -> None:
        if held.phase is Phase.WRITING and held.memory is not None:
            self.file.read(raw_bytes(held.memory), held.offset)
            return
        original(self, held)

    original = DiskStore._bring_to_memory
    with mock.patch.object(DiskStore, "_bring_to_memory", bring):
        yield


@contextmanager
def _range_is_free_while_it_is_written() -> Iterator[None]:
    with mock.patch.object(DiskRange, "is_in_use", False):
        yield


@contextmanager
def _memory_is_free_before_the_copy_ends() -> Iterator[None]:
    """A piece is used again once its holder has gone, whatever copy reads it."""
    original = store_module.DiskMemory.retire

    def retire(self: Any, place: Any, memory: torch.Tensor, copies: Any) -> None:
        original(self, place, memory, ())

    with mock.patch.object(store_module.DiskMemory, "retire", retire):
        yield


@contextmanager
def _written_before_the_copy_has_ended() -> Iterator[None]:
    original = DiskStore.__init__

    def init(self: DiskStore, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "await_copy": lambda copy: None})

    with mock.patch.object(DiskStore, "__init__", init):
        yield


@contextmanager
def _wrong_offset_after_a_short_access() -> Iterator[None]:
    """What is missing is transferred from where the call ended, rounded up."""

    def next_page(done: int, count: int, nbytes: int) -> int:
        return min(nbytes, done + -(-count // PAGE) * PAGE)

    with mock.patch.object(nameless_file, "_next_page", next_page):
        yield


@contextmanager
def _read_is_used_before_it_is_checked() -> Iterator[None]:
    with mock.patch.object(store_module, "IN_MEMORY", store_module.IN_MEMORY | {Phase.READING}):
        yield


@contextmanager
def _given_up_before_it_is_written() -> Iterator[None]:
    def can_leave(self: DiskRange) -> bool:
        return self.phase in (Phase.CLEAN, Phase.DIRTY) and not self.num_holders

    with mock.patch.object(DiskRange, "can_leave_memory", property(can_leave)):
        yield


MUTANTS = (
    _forward_from_a_half_written_range,
    _range_is_free_while_it_is_written,
    _memory_is_free_before_the_copy_ends,
    _written_before_the_copy_has_ended,
    _wrong_offset_after_a_short_access,
    _read_is_used_before_it_is_checked,
    _given_up_before_it_is_written,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.__name__.strip("_"))
def test_mutants_are_caught(mutant: Callable[[], Any], tmp_path: Path) -> None:
    with mutant():
        for seed in range(200):
            try:
                run(seed, tmp_path)
            except (AssertionError, PyAOError, SimulatedRaceError):
                return
    pytest.fail("no schedule noticed it")
