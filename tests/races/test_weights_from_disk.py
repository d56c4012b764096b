"""Reads of blocks that are late, in any order, or fail, beside copies that run as late as they may.

The reader of these tests has no threads: a seed draws when a read is done, and until then its
target holds poison.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.install import weights_on_disk
from hf_pyao.engine.stores.disk_blocks import BlockFile, BlockPlace, file_of_blocks
from hf_pyao.engine.stores.disk_files import PAGE_BYTES
from hf_pyao.engine.stores.disk_reader import DiskReader, span_of
from hf_pyao.engine.transfer.stream_transport import StreamTransport
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.on_disk import WeightsInFile, spans_of
from hf_pyao.engine.weights.read_ahead import Arrival, ReadAhead
from hf_pyao.errors import DiskError
from tests.helpers.disks import on_disk, take_any_file_system
from tests.helpers.simulation.transport import SimulatedTransport
from tests.races import test_streamed_weights
from tests.races.fake_streams import FakeStreamTransport, fake_streams
from tests.races.test_streamed_weights import frozen_stack, one_stream, steps

NUM_SCHEDULES = 5000
PIECE = 2 * PAGE_BYTES
NUM_BLOCKS = 4
NUM_SLOTS = 2
Blocks = tuple[BlockFile, torch.Tensor, list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_file_system(monkeypatch)


class DrawnRead:
    """A read that is done when its reader's seed says so."""

    def __init__(self, reader: DrawnReader, target: torch.Tensor, start: int, end: int) -> None:
        self._reader = reader
        self.target = target
        self.start, self.end = start, end
        self.is_cancelled = False
        self.is_lost = False
        self.has_ended = False
        self.content: torch.Tensor | None = None
        """What comes; None: the read fails."""

    @property
    def is_done(self) -> bool:
        self._reader.tick()
        return self.has_ended

    def end_now(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if self.content is not None and not self.is_cancelled:
                self.target[: self.content.numel()] = self.content

    def wait(self) -> None:
        self.end_now()
        if self.content is None:
            raise DiskError("cannot read 'a file': drawn")

    def wait_until_done(self, timeout_s: float) -> bool:
        self._reader.tick(most=True)
        return self.has_ended

    def cancel(self) -> None:
        self.is_cancelled = True
        self.end_now()


class DrawnReader(DiskReader):
    """Reads as a seed draws: late, in any order, some of them failing."""

    def __init__(self, seed: int, failing: float = 0.0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.1, 0.5))
        self._failing = failing
        self._pending: list[DrawnRead] = []
        self._content: torch.Tensor | None = None

    def read(
        self, file: BlockFile, place: BlockPlace, target: torch.Tensor, first: int, nbytes: int
    ) -> Any:
        start, end = span_of(place, first, nbytes)
        found = DrawnRead(self, target, start, end)
        target.fill_(0xFF)
        if self._random.random() >= self._failing:
            first = place.offset + start
            found.content = self._bytes_of(file)[first : first + end - start]
            self.read_bytes += end - start
        self._pending.append(found)
        return found

    def _bytes_of(self, file: BlockFile) -> torch.Tensor:
        if self._content is None:
            content = bytearray(file.path.read_bytes())
            self._content = torch.frombuffer(content, dtype=torch.uint8)
        return self._content

    def tick(self, *, most: bool = False) -> None:
        while self._pending and (most or self._random.random() < self._eagerness):
            self._pending.pop(self._random.randrange(len(self._pending))).end_now()
            most = False

    def close(self) -> None:
        while self._pending:
            self._pending.pop().end_now()


# ---- pieces, reads and copies alone ------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    """A file of blocks, its bytes, and those of each block."""
    draw = random.Random(0)
    contents = [
        torch.frombuffer(bytearray(draw.randbytes(5 * PAGE_BYTES + 100 * n)), dtype=torch.uint8)
        for n in range(NUM_BLOCKS)
    ]
    folder = tmp_path_factory.mktemp("blocks")
    file = file_of_blocks(folder, [each.clone for each in contents])
    return file, torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8), contents


def uploads(
    seed: int,
    file: BlockFile,
    whole: torch.Tensor,
    contents: Sequence[torch.Tensor],
    failing: float = 0.0,
) -> int:
    """Bring blocks to slots as a seed draws; check each; return how many could not be read."""
    draw = random.Random(seed)
    transport = SimulatedTransport(seed)
    reader = DrawnReader(seed, failing)
    reader._content = whole
    memory = torch.zeros(draw.choice((1, 2, 3, 5)) * PIECE + PAGE_BYTES, dtype=torch.uint8)
    ahead = ReadAhead(memory, PIECE, reader, transport, UploadFigures())
    sources = [WeightsInFile(file, place) for place in file.places]
    spans = [
        # A file has a checksum for each MiB: whole blocks, here in spans of a piece of them.
        [*spans_of(0, place.nbytes, 0, PIECE)]
        for place in file.places
    ]
    slots = [torch.zeros(6 * PAGE_BYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    under_way: dict[int, tuple[int, Arrival, list[Any]]] = {}
    num_failed = 0
    for _ in range(4):
        slot, block = draw.randrange(NUM_SLOTS), draw.randrange(NUM_BLOCKS)
        if slot in under_way:  # no one has waited for it
            _, arrival, tickets = under_way.pop(slot)
            ahead.cancel(arrival)
            for ticket in tickets:
                transport.retire(ticket)
        tickets = []

        def copy(start: int, source: torch.Tensor, slot: int = slot, to: Any = tickets) -> Any:
            ticket = transport.reload(source, slots[slot][start : start + source.numel()])
            to.append(ticket)
            return ticket

        arrival = ahead.begin(block, sources[block], spans[block], copy)
        under_way[slot] = block, arrival, tickets
        coming = draw.sample(range(NUM_BLOCKS), 2)
        ahead.expect([(each, sources[each], spans[each]) for each in coming])
        if draw.random() < 0.7:
            slot = draw.choice(list(under_way))
            block, arrival, tickets = under_way.pop(slot)
            try:
                ahead.finish(arrival)
            except DiskError:
                num_failed += 1
                for ticket in tickets:
                    transport.retire(ticket)
                continue
            for ticket in tickets:
                transport.wait(ticket)
            assert torch.equal(slots[slot][: contents[block].numel()], contents[block]), seed
    ahead.release()
    ahead.wait_for_copies()
    assert transport.violations == []
    return num_failed


@pytest.fixture(autouse=True)
def _small_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page have a checksum, so that blocks of a few pages come in spans."""
    for module in ("disk_reader", "disk_blocks"):
        monkeypatch.setattr(f"hf_pyao.engine.stores.{module}.CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr("hf_pyao.engine.weights.on_disk.CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(test_streamed_weights, "SIZE", 48)  # blocks of more than a page


@pytest.mark.parametrize(
    "num_schedules", [500, pytest.param(NUM_SCHEDULES, marks=pytest.mark.thorough)]
)
def test_slots_have_the_files_bytes_under_every_schedule(
    blocks: Blocks, num_schedules: int
) -> None:
    num_failed = 0
    for seed in range(num_schedules):
        num_failed += uploads(seed, *blocks, failing=0.05 * (seed % 2))
    assert num_failed > num_schedules / 100, "schedules with reads that fail"


def is_caught(blocks: Blocks, num_seeds: int = 60) -> bool:
    for seed in range(num_seeds):
        try:
            uploads(seed, *blocks)
        except (AssertionError, RuntimeError):
            return True
    return False


def test_mutant_whose_pieces_are_free_as_their_read_ends_is_caught(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_free(ahead: ReadAhead, piece: Any) -> bool:
        return piece.read is None

    monkeypatch.setattr(ReadAhead, "_is_free", is_free)
    assert is_caught(blocks)


def test_mutant_that_copies_before_the_read_has_ended_is_caught(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawnRead, "is_done", True)
    monkeypatch.setattr(DrawnRead, "wait", lambda read: None)
    assert is_caught(blocks)


def test_mutant_whose_cancelled_reads_go_on_is_caught(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawnRead, "cancel", lambda read: None)
    assert is_caught(blocks)


# ---- a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_schedules", [8, pytest.param(1000, marks=pytest.mark.thorough)])
def test_bits_are_those_of_the_resident_run(
    num_schedules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(frozen_stack())
    settings = ({"policy": "all"}, {"policy": "off"}, {"policy": "all", "checkpoint_every": 2})
    for seed in range(num_schedules):
        model = frozen_stack()
        transport = SimulatedTransport(seed, copy_streams=1 + seed % 2)
        monkeypatch.setattr(weights_on_disk, "DiskReader", lambda seed=seed: DrawnReader(seed))
        config = on_disk(model, tmp_path, (0.7, 0.99)[seed % 2], **settings[seed % 3])
        with attach(model, PyAOConfig(**config), transport=transport) as offloader:
            found = steps(model)
            assert offloader.weights is not None
            assert offloader.weights.figures()["disk_read_bytes"] > 0
        assert transport.violations == []
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), seed


def races_of(folder: Path) -> list[str]:
    model = frozen_stack()
    with fake_streams(1) as world:
        config = PyAOConfig(**on_disk(model, folder, policy="off"))
        with attach(model, config, transport=FakeStreamTransport()):
            one_stream(world, model)
        world.bury()
        return list(world.races)


def test_every_access_to_a_slot_is_ordered(tmp_path: Path) -> None:
    assert races_of(tmp_path) == []


def test_mutant_whose_late_copies_wait_for_no_compute_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamTransport, "mark", lambda t, device: t._event(device))
    assert races_of(tmp_path)
