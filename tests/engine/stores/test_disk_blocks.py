"""Files of blocks and their reader: bytes, direct reads, faults. Judged by Python's own files."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import random
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pyao.engine.stores import disk_blocks, disk_files, disk_reader
from hf_pyao.engine.stores.disk_blocks import CHUNK_BYTES, BlockFile, file_of_blocks
from hf_pyao.engine.stores.disk_reader import BlockRead, DiskReader, span_of
from hf_pyao.engine.stores.private_mapping import private_mapping, tells_writes, was_written
from hf_pyao.engine.stores.raw_bytes import raw_bytes
from hf_pyao.errors import DiskError, InternalError

SIZES = (1, 4096, 5 * CHUNK_BYTES // 2 + 17, 3 * CHUNK_BYTES, 9 * CHUNK_BYTES + 4097)


def blocks_of(seed: int, sizes: Sequence[int] = SIZES) -> list[torch.Tensor]:
    draw = random.Random(seed)
    return [torch.frombuffer(bytearray(draw.randbytes(n)), dtype=torch.uint8) for n in sizes]


def write(folder: Path, blocks: Sequence[torch.Tensor]) -> BlockFile:
    return file_of_blocks(folder, [functools.partial(torch.clone, each) for each in blocks])


def aligned_memory(nbytes: int) -> torch.Tensor:
    memory = torch.full((disk_blocks.padded(nbytes) + 4096,), 0xA5, dtype=torch.uint8)
    first = -memory.data_ptr() % 4096
    return memory[first : first + disk_blocks.padded(nbytes)]


def begin(reader: DiskReader, file: BlockFile, number: int) -> BlockRead:
    place = file.places[number]
    return reader.read(file, place, aligned_memory(place.nbytes), 0, place.nbytes)


def whole(reader: DiskReader, file: BlockFile, number: int) -> torch.Tensor:
    read = begin(reader, file, number)
    read.wait()
    return read.target[: file.places[number].nbytes]


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_blocks_come_back_and_reads_are_direct(tmp_path: Path) -> None:
    blocks = blocks_of(0)
    file, reader = write(tmp_path, blocks), DiskReader()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    if file.is_direct:
        assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
    for number, block in enumerate(blocks):
        assert torch.equal(whole(reader, file, number), block), number
        with file.path.open("rb") as plain:
            plain.seek(file.places[number].offset)
            assert plain.read(len(block)) == block.numpy().tobytes(), number
    reader.close()
    assert torch.equal(whole(reader, file, 1), blocks[1]), "a later read starts the threads again"
    reader.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("pyao-disk")]


def test_a_part_of_a_block_is_read_by_whole_checksums(tmp_path: Path) -> None:
    blocks = blocks_of(1)
    file, reader = write(tmp_path, blocks), DiskReader()
    place, first, nbytes = file.places[4], 2 * CHUNK_BYTES + 5, 3 * CHUNK_BYTES
    start, end = span_of(place, first, nbytes)
    assert (start, end) == (2 * CHUNK_BYTES, 6 * CHUNK_BYTES)
    read = reader.read(file, place, aligned_memory(end - start), first, nbytes)
    read.wait()
    assert torch.equal(read.target[5 : 5 + nbytes], blocks[4][first : first + nbytes])
    with pytest.raises(InternalError, match="aligned"):
        reader.read(file, place, aligned_memory(2**23)[1:], 0, 4096)
    reader.close()


def test_the_same_content_is_written_once(tmp_path: Path) -> None:
    first = write(tmp_path, blocks_of(2))
    written = first.path.stat().st_mtime_ns
    again = write(tmp_path, blocks_of(2))
    other = write(tmp_path, blocks_of(3))
    assert (again.path, again.path.stat().st_mtime_ns) == (first.path, written)
    assert other.path != first.path
    assert write(tmp_path, blocks_of(2)[:-1]).path != first.path
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("how", ["header", "short", "empty"])
def test_a_damaged_file_is_written_again(tmp_path: Path, how: str) -> None:
    blocks = blocks_of(4)
    path = write(tmp_path, blocks).path
    if how == "header":
        damage(path, 40)
    else:
        os.truncate(path, 0 if how == "empty" else path.stat().st_size - 4096)
    with pytest.raises(DiskError, match=path.name):
        BlockFile.open(path)
    file, reader = write(tmp_path, blocks), DiskReader()
    assert torch.equal(whole(reader, file, 2), blocks[2])
    reader.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_failing_write_leaves_nothing_and_names_the_file(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_writes = os.write, 0

    def failing(descriptor: int, content: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 3:
            raise OSError(error, os.strerror(error))
        return real(descriptor, content[:1000])  # short writes are completed

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.os, "write", failing)
        with pytest.raises(DiskError, match=r"weights-.*\.bin"):
            write(tmp_path, blocks_of(5))
    assert not list(tmp_path.iterdir())
    assert write(tmp_path, blocks_of(5)).path.exists()


def test_a_removed_folder_and_a_link_are_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="gone"):
        write(tmp_path / "gone", blocks_of(6))
    path = write(tmp_path, blocks_of(6)).path
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(DiskError, match=path.name):
        write(tmp_path, blocks_of(6))


def test_without_direct_reads_pages_are_dropped_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, dropped = disk_files.open_to_read, []

    def refusing(path: Path, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, direct=False)

    monkeypatch.setattr(disk_blocks, "open_to_read", refusing)
    monkeypatch.setattr(disk_reader, "drop_pages", lambda *args: dropped.append(args))
    blocks = blocks_of(8)
    file, reader = write(tmp_path, blocks), DiskReader()
    assert not file.is_direct
    assert not disk_files.is_direct(file.descriptor)
    assert torch.equal(whole(reader, file, 4), blocks[4])
    assert sum(each[2] for each in dropped) == disk_blocks.padded(SIZES[4])
    assert sum("O_DIRECT" in each.getMessage() for each in caplog.records) == 1
    reader.close()


class Faulty:
    """Reads that are short, late, out of order or fail, by a seed."""

    def __init__(self, seed: int, *, num_errors: int = 0, is_short: bool = True) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.num_errors = num_errors
        self.num_short = 0
        self._is_short = is_short

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        with self._lock:
            draw, share = self._random.random(), self._random.random()
            fails = bool(self.num_errors) and draw < 0.4
            self.num_errors -= fails
        if fails:
            buffer[: len(buffer) // 2 // 4096 * 4096] = bytes(len(buffer) // 2 // 4096 * 4096)
            raise OSError(errno.EIO, "Input/output error")
        if draw < 0.6:
            threading.Event().wait(share * 2e-3)
        if self._is_short and len(buffer) > 8192 and draw > 0.5:
            # The kernel may end anywhere: what came behind the last whole page is read again.
            length = max(4096, int(len(buffer) * share) // 4096 * 4096)
            got = os.preadv(descriptor, [buffer[:length]], offset)
            with self._lock:
                self.num_short += 1
            torn = min(got, length) - self._random.randrange(0, 4096)
            if torn >= 4096:
                buffer[torn:got] = bytes(got - torn)
                return torn
            return got
        return os.preadv(descriptor, list(buffers), offset)


@pytest.mark.parametrize("first_seed", [0, 50])
def test_short_late_and_failing_reads_give_equal_bytes_or_an_error(
    tmp_path: Path, first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 schedules: a range may fail once; a second failure is an error that names the file."""
    monkeypatch.setattr(disk_reader, "RANGE_BYTES", CHUNK_BYTES)
    blocks = blocks_of(9, (3 * CHUNK_BYTES + 70000, 8192))
    file = write(tmp_path, blocks)
    num_read = num_short = 0
    always = sum(2 for seed in range(first_seed, first_seed + 50) if seed % 4 <= 1)
    for seed in range(first_seed, first_seed + 50):
        faulty = Faulty(seed, num_errors=seed % 4)
        reader = DiskReader(faulty)
        for number in (1, 0):
            try:
                assert torch.equal(whole(reader, file, number), blocks[number]), seed
                num_read += 1
            except DiskError as error:
                assert str(file.path) in str(error)  # noqa: PT017
        reader.close()
        num_short += faulty.num_short
    assert num_read >= always, "one failure is always repaired"
    assert num_short


def retry_at_the_next_page(reader: Any, read: BlockRead, at: int) -> None:
    """Fill a range; what a failed read is tried again from is a page too late."""
    try:
        FILL(reader, read, at)
    except OSError:
        nbytes = min(at + disk_reader.RANGE_BYTES, read.end) - at
        memory = raw_bytes(read.target)[at - read.start :][: disk_blocks.padded(nbytes)]
        os.preadv(read.file.descriptor, [memory], read.place.offset + at + 4096)


def go_on_behind_a_torn_page(reader: Any, read: BlockRead, at: int) -> None:
    """Fill a range; after a short read go on behind the page in which it ended."""
    nbytes = disk_blocks.padded(min(at + disk_reader.RANGE_BYTES, read.end) - at)
    memory = raw_bytes(read.target)[at - read.start : at - read.start + nbytes]
    done = 0
    while done < nbytes:
        first = read.place.offset + at + done
        done += disk_blocks.padded(reader._read_into(read.file.descriptor, [memory[done:]], first))


FILL = DiskReader._fill


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("fill", [FILL, retry_at_the_next_page, go_on_behind_a_torn_page])
def test_mutants_that_go_on_at_a_wrong_offset_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Any, is_checked: bool
) -> None:
    """By their bytes without checksums, and by an error with them; the reader itself is not."""
    monkeypatch.setattr(disk_reader, "RANGE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(DiskReader, "_fill", fill)
    if not is_checked:
        monkeypatch.setattr(DiskReader, "_agrees", lambda *_: True)
    blocks = blocks_of(9, (3 * CHUNK_BYTES + 70000, 8192))
    file = write(tmp_path, blocks)
    num_wrong = num_refused = 0
    # One failure is always repaired; a mutant needs a second one in the same range to be refused.
    most_errors = 8 if fill is retry_at_the_next_page else 1
    for seed in range(20):
        reader = DiskReader(Faulty(seed, num_errors=most_errors * (seed % 2)))
        for number in (1, 0):
            try:
                num_wrong += not torch.equal(whole(reader, file, number), blocks[number])
            except DiskError:
                num_refused += 1
        reader.close()
    is_mutant = fill is not FILL
    assert bool(num_wrong) == (is_mutant and not is_checked)
    assert bool(num_refused) == (is_mutant and is_checked)


def test_a_corrupted_block_is_never_handed_out(tmp_path: Path) -> None:
    blocks = blocks_of(10)
    file = write(tmp_path, blocks)
    draw = random.Random(3)
    for _ in range(20):
        number = draw.randrange(len(blocks))
        at = file.places[number].offset + draw.randrange(SIZES[number])
        damage(file.path, at)
        reader = DiskReader()
        with pytest.raises(DiskError, match="checksum"):
            whole(reader, file, number)
        assert reader.num_retries == 1
        damage(file.path, at)  # the same bit again: as it was
        assert torch.equal(whole(reader, file, number), blocks[number])
        reader.close()


def test_a_file_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    file, reader = write(tmp_path, blocks_of(12)), DiskReader()
    os.truncate(file.path, file.places[4].offset + 4096)
    with pytest.raises(DiskError, match="ends at byte"):
        whole(reader, file, 4)
    reader.close()


def test_nothing_writes_into_the_target_after_a_checksum_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first range is damaged; the others are still being read when that is known."""
    monkeypatch.setattr(disk_reader, "RANGE_BYTES", CHUNK_BYTES)
    file = write(tmp_path, blocks_of(16))
    place = file.places[4]

    def late(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= place.offset + CHUNK_BYTES:
            threading.Event().wait(0.1)
        return os.preadv(descriptor, list(buffers), offset)

    damage(file.path, place.offset + 9)
    reader = DiskReader(late)
    read = begin(reader, file, 4)
    with pytest.raises(DiskError, match="checksum"):
        read.wait()
    read.target.fill_(1)
    reader.close()
    assert bool((read.target == 1).all())


def test_a_private_mapping_keeps_writes_to_itself_and_the_kernel_tells(tmp_path: Path) -> None:
    blocks = blocks_of(14)
    file, reader = write(tmp_path, blocks), DiskReader()
    if not tells_writes(file):
        pytest.skip("the kernel does not tell which pages were written")
    mapped = [private_mapping(file, place) for place in file.places]
    for memory, block in zip(mapped, blocks, strict=True):
        assert torch.equal(memory, block)
        assert not was_written(memory), "a read is no write"
    mapped[4][5 * CHUNK_BYTES + 3] += 1
    assert [was_written(each) for each in mapped] == [False, False, False, False, True]
    assert torch.equal(whole(reader, file, 4), blocks[4]), "nothing reaches the file"
    reader.close()
