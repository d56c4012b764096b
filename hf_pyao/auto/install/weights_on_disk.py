"""Where streamed weights are on a disk, and the host memory that they pass through."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from hf_pyao.config import GIB
from hf_pyao.engine.stores import Store
from hf_pyao.engine.stores.disk_blocks import BlockFile, BlockPlace, file_of_blocks
from hf_pyao.engine.stores.disk_figures import speed
from hf_pyao.engine.stores.disk_files import private_folder, remove_leftovers
from hf_pyao.engine.stores.disk_reader import DiskReader
from hf_pyao.engine.stores.mapped_files import MappedFiles
from hf_pyao.engine.stores.private_mapping import tells_writes
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.on_disk import WeightsInFile
from hf_pyao.engine.weights.read_ahead import ReadAhead
from hf_pyao.errors import ConfigError
from hf_pyao.model.weights.streamable import StreamableLayer
from hf_pyao.plan.step.disk_share import NOTHING_ON_DISK, DiskShare, disk_share


class WeightsOnDisk:
    """Puts the weights of layers into a file of blocks, which has those of all layers of a base.

    The file is written once, and found again by what it holds. Making one of these makes the folder
    and changes nothing else.

    Args:
        path: the folder that was configured; None: nothing is on a disk.
        label: how messages call that setting.
        store: host memory.
        transport: copies to the device.
        mapped_files: lets the pages of a mapped checkpoint go once they were copied.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        label: str,
        store: Store,
        transport: Transport,
        mapped_files: MappedFiles,
    ) -> None:
        self._folder: Path | None = None
        if path is not None:
            self._folder = private_folder(path, label)
            remove_leftovers(self._folder)
        self._label = label
        self._store = store
        self._transport = transport
        self._let_go = mapped_files.let_go
        self._file: BlockFile | None = None
        self._places: dict[str, BlockPlace] = {}
        """By the layer's qualified name."""
        self._staging: torch.Tensor | None = None
        self.reader = DiskReader()
        """Reads the blocks; tests exchange it."""
        self.share: DiskShare = NOTHING_ON_DISK
        """What is on the disk, or is to be, by position in the model."""

    @property
    def is_given(self) -> bool:
        """Whether weights may lie on a disk."""
        return self._folder is not None

    def choose(self, sizes: dict[int, int], room_bytes: int) -> None:
        """Choose which layers are on the disk.

        Args:
            sizes: host bytes of the streamed layers, by number.
            room_bytes: host memory for them.
        """
        numbers = sorted(sizes)
        share = disk_share([sizes[number] for number in numbers], room_bytes)
        self.share = share.among(numbers)

    def forget(self) -> None:
        """Have nothing on the disk, where nothing could be put there."""
        self.release()
        self.share = NOTHING_ON_DISK

    @property
    def placed(self) -> DiskShare | None:
        """What is on the disk, or is to be; None for nothing."""
        return self.share if self.share.layers else None

    @property
    def taken_bytes(self) -> int:
        """What reads take of the capacity of the host's store now."""
        return 0 if self._staging is None else self._store.taken_bytes(self._staging)

    @property
    def read_gib_per_s(self) -> float | None:
        """Speed of the disk while weights were read so far, in GiB/s; None: none were."""
        return speed(self.reader.read_bytes, self.reader.read_ms)

    def take(self, masters: Masters, layers: Sequence[StreamableLayer]) -> bool:
        """Let *masters* be read from the file; make it if there is none yet.

        Args:
            masters: weights of a layer, which lie in order.
            layers: all layers of the model, as they are now.

        Returns:
            False if the file has no such block, or the host no room for what is read ahead.

        Raises:
            ConfigError: the system does not tell which weights in the file were written.
            DiskError: the file cannot be written or read.
        """
        if self._staging is None:
            self._staging = self._store.reserve(self.share.reserved_bytes)
            if self._staging is None:
                return False
        file = self._file
        if file is None:
            file = self._make(layers)
        place = self._places.get(masters.layer)
        if place is None or place.nbytes != masters.nbytes:
            return False
        masters.stay_in(WeightsInFile(file, place))
        return True

    def read_ahead(self, found: Collection[Masters], counts: UploadFigures) -> ReadAhead | None:
        """Return what reads the weights that are on the disk; None if none of *found* are."""
        if self._staging is None or not any(masters.in_file for masters in found):
            return None
        piece_bytes = self.share.piece_bytes
        return ReadAhead(self._staging, piece_bytes, self.reader, self._transport, counts)

    def release(self) -> None:
        """Give the host memory for reads back to the store. It may be called again."""
        self.reader.close()
        if self._staging is not None:
            self._store.return_reserved(self._staging)
            self._staging = None

    def describe(self, found: Sequence[Masters]) -> str:
        """Say in a phrase what of *found* is on the disk; empty for nothing."""
        nbytes = [masters.nbytes for masters in found if masters.in_file is not None]
        if not nbytes or self._file is None:
            return ""
        how = "direct reads" if self._file.is_direct else "reads through the page cache"
        return (
            f"{len(nbytes)} of them ({sum(nbytes) / GIB:.2f} GiB) lie in {self._file.path} and are "
            f"read ahead into {self.share.staging_bytes / GIB:.3f} GiB of host memory ({how})"
        )

    def _make(self, layers: Sequence[StreamableLayer]) -> BlockFile:
        found = [Masters(each.fqn, each.tensors, lie_in_order=True) for each in layers]
        found = [masters for masters in found if masters.masters]

        assert self._folder is not None
        file = file_of_blocks(
            self._folder, [functools.partial(masters.content, self._let_go) for masters in found]
        )
        self._places = dict(zip((masters.layer for masters in found), file.places, strict=True))
        if not tells_writes(file):
            raise ConfigError(
                f"{self._label}: this system does not tell which pages of a mapped file were "
                "written (/proc/self/pagemap), so that weights that were changed would not be "
                "noticed. Set disk_path to None, or raise host_memory_gib.",
                key="disk-folder",
            )
        self._file = file
        return file
