"""A file of blocks: bytes that are written once, keyed by what they hold, and read many times.

[Note: File of blocks]
The file begins with a header: :data:`MAGIC`, the length of a JSON text (8 bytes, little-endian),
its CRC-32 (4 bytes, little-endian), and the text. It has each block's size, and the checksum
(:mod:`~hf_pyao.engine.checksums`) of each chunk of :data:`CHUNK_BYTES`. Header and blocks
start at multiples of 4096 bytes and are padded to such, so that direct reads of any chunk are
aligned. The file's name has the SHA-256 of all blocks. A file in the whole name is complete, since
it gets that name after it was flushed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_pyao.engine.checksums import checksum
from hf_pyao.engine.stores.disk_files import (
    PAGE_BYTES,
    being_written,
    disk_error,
    drop_pages,
    has_no_direct_reads,
    open_to_read,
    part_of,
    write_all,
)
from hf_pyao.engine.stores.raw_bytes import raw_bytes
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

MAGIC = b"PYAOBLK2"
"""The first bytes of a file of blocks; the digit is the format's version."""

CHUNK_BYTES = 2**20
"""Bytes that have one checksum."""

_PREFIX_BYTES = len(MAGIC) + 8 + 4
_MOST_HEADER_BYTES = 2**28

MakeBlock = Callable[[], torch.Tensor]
"""Returns a block's bytes: uint8, one dimension, contiguous, on the host."""


@dataclass(frozen=True)
class BlockPlace:
    """Where a block is in its file."""

    offset: int
    """First byte in the file; a multiple of 4096."""
    nbytes: int
    """Bytes of the block, without padding."""
    checksums: tuple[int, ...]
    """Checksum of each chunk (:mod:`~hf_pyao.engine.checksums`); the last one may be shorter."""


class BlockFile:
    """A file of blocks, open for reading.

    Args:
        path: the file.
        places: its blocks.
        descriptor: open for reads that bypass the page cache, where the file system has them.
        is_direct: whether they do.
    """

    def __init__(
        self, path: Path, places: Sequence[BlockPlace], descriptor: int, *, is_direct: bool
    ) -> None:
        self.path = path
        self.places = tuple(places)
        self.descriptor = descriptor
        self.is_direct = is_direct
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, path: Path) -> BlockFile:
        """Open the file at *path*, and check its header and size.

        Raises:
            DiskError: it cannot be read, or is no whole file of blocks.
        """
        try:
            places = _read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as cause:
            reason = cause if isinstance(cause, OSError) else f"it is damaged ({cause})"
            raise disk_error("read", path, reason, "Remove it: it is written again.") from cause
        try:
            try:
                return cls(path, places, open_to_read(path, direct=True), is_direct=True)
            except OSError as cause:
                if not has_no_direct_reads(cause):
                    raise
            warn(
                logger,
                "disk-not-direct",
                "the file system of %s has no direct reads (O_DIRECT): weights are read through "
                "the page cache, whose pages are dropped after each read. This is slower.",
                path,
            )
            return cls(path, places, open_to_read(path, direct=False), is_direct=False)
        except OSError as cause:
            raise disk_error("read", path, cause, "Give another folder.") from cause


def file_of_blocks(folder: Path, blocks: Sequence[MakeBlock]) -> BlockFile:
    """Return the file in *folder* that has *blocks*; write it if there is none.

    Each block is made once for its checksums, and once more if the file is written. One block is
    in memory at a time. Several processes may call this at once: one writes, the others wait.

    Raises:
        DiskError: the file cannot be written or read; nothing is left of it then.
    """
    digest = hashlib.sha256(MAGIC)
    places: list[tuple[int, list[int]]] = []
    for make in blocks:
        content = raw_bytes(made := make())
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
        places.append((len(content), [checksum(each) for each in chunks_of(content)]))
        del content, made
    header, placed = _header(places)
    path = folder / f"weights-{digest.hexdigest()[:40]}.bin"
    try:
        if _is_whole(path, placed):
            return BlockFile.open(path)
        with being_written(path) as descriptor:
            if not _is_whole(path, placed):  # else another process wrote it meanwhile
                _write(descriptor, header, placed, blocks)
                os.replace(part_of(path), path)
                _flush_folder(folder)
    except OSError as cause:
        needed_gib = (placed[-1].offset + placed[-1].nbytes if placed else 0) / 2**30
        remedy = f"It takes {needed_gib:.3f} GiB. Make room for it, or give another folder."
        raise disk_error("write", path, cause, remedy) from cause
    return BlockFile.open(path)


def padded(nbytes: int) -> int:
    """Return *nbytes*, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def chunks_of(content: memoryview) -> list[memoryview]:
    """Return the parts of *content* that have one checksum each."""
    return [content[n : n + CHUNK_BYTES] for n in range(0, len(content), CHUNK_BYTES)]


def _header(blocks: Sequence[tuple[int, list[int]]]) -> tuple[bytes, list[BlockPlace]]:
    """Return the padded header, and where the blocks are behind it."""
    text = json.dumps([{"nbytes": n, "checksums": sums} for n, sums in blocks]).encode()
    prefix = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    header = prefix + text
    header += bytes(padded(len(header)) - len(header))
    return header, _placed(len(header), blocks)


def _placed(first: int, blocks: Sequence[tuple[int, list[int]]]) -> list[BlockPlace]:
    places, offset = [], first
    for nbytes, checksums in blocks:
        places.append(BlockPlace(offset, nbytes, tuple(checksums)))
        offset += padded(nbytes)
    return places


def _read_header(path: Path) -> list[BlockPlace]:
    """Return the places in the file at *path*.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no whole file of blocks; or KeyError, TypeError.
    """
    descriptor = open_to_read(path, direct=False)
    try:
        prefix = os.pread(descriptor, _PREFIX_BYTES, 0)
        text_bytes = int.from_bytes(prefix[8:16], "little")
        if not prefix.startswith(MAGIC) or text_bytes > _MOST_HEADER_BYTES:
            raise ValueError("no file of blocks")
        text = os.pread(descriptor, text_bytes, _PREFIX_BYTES)
        if len(text) != text_bytes or zlib.crc32(text) != int.from_bytes(prefix[16:20], "little"):
            raise ValueError("header")
        blocks = [(each["nbytes"], each["checksums"]) for each in json.loads(text)]
        places = _placed(padded(_PREFIX_BYTES + text_bytes), blocks)
        expected = places[-1].offset + padded(places[-1].nbytes) if places else 0
        if os.fstat(descriptor).st_size < expected:
            raise ValueError("too short")
        return places
    finally:
        os.close(descriptor)


def _is_whole(path: Path, places: Sequence[BlockPlace]) -> bool:
    """Say whether *path* is a whole file with *places*; a damaged one is written anew.

    Raises:
        OSError: it is there, and cannot be read (a link, or another user's).
    """
    try:
        return _read_header(path) == list(places)
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return False


def _write(
    descriptor: int, header: bytes, places: Sequence[BlockPlace], blocks: Sequence[MakeBlock]
) -> None:
    end = places[-1].offset + padded(places[-1].nbytes) if places else len(header)
    with contextlib.suppress(AttributeError):  # not on macOS
        os.posix_fallocate(descriptor, 0, end)  # a full disk is known before anything is written
    write_all(descriptor, memoryview(header))
    for place, make in zip(places, blocks, strict=True):
        content = raw_bytes(made := make())
        for number, chunk in enumerate(chunks_of(content)):
            if checksum(chunk) != place.checksums[number]:
                raise OSError(None, "weights changed while they were written")
            write_all(descriptor, chunk)
        write_all(descriptor, memoryview(bytes(padded(place.nbytes) - place.nbytes)))
        os.fdatasync(descriptor)
        drop_pages(descriptor, place.offset, padded(place.nbytes))
        del content, made
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
