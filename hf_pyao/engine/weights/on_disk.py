"""A layer's frozen weights in a file of blocks: where uploads find them, and whether they still do.

The Parameter objects are views of a private mapping of the file. Whoever reads them
(``state_dict``, ``save_pretrained``) reads the file; what is written goes to pages of this
process's own, and never to the file. Uploads read the file itself, past the page cache. So weights
that were written in place are refused at their next upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_pyao.engine.stores.disk_blocks import CHUNK_BYTES, BlockFile, BlockPlace
from hf_pyao.engine.stores.disk_files import disk_error
from hf_pyao.engine.stores.mapped_files import MappedFiles
from hf_pyao.engine.stores.private_mapping import PAGEMAP, private_mapping, was_written


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a block that are read at once."""

    first: int
    """Their first byte in the layer's block of the file."""
    nbytes: int
    start: int
    """Their first byte in the slot."""


class WeightsInFile:
    """The weights of one layer in a file.

    Args:
        file: the file.
        place: the layer's block in it.

    Raises:
        OSError: the system refuses the mapping.
    """

    def __init__(self, file: BlockFile, place: BlockPlace) -> None:
        self.file = file
        self.place = place
        self.memory = private_mapping(file, place)
        """What the parameters are views of: uint8, shape (nbytes,)."""
        self._mapped_files = MappedFiles()

    def was_written(self) -> bool:
        """Say whether the weights were changed since they were mapped, however that was done.

        Raises:
            DiskError: the system does not tell, such as when all descriptors are in use.
        """
        try:
            return was_written(self.memory)
        except OSError as cause:
            raise disk_error(
                "use",
                self.file.path,
                f"whether its weights were changed in memory is not known ({PAGEMAP}: "
                f"{cause.strerror or cause})",
                "Close files (ulimit -n), or set disk_path to None.",
            ) from cause

    def let_go_of_pages(self) -> None:
        """Let the kernel drop what someone's reads have left of the mapping. Nothing is lost."""
        self._mapped_files.let_go(self.memory)


def spans_of(first: int, nbytes: int, start: int, most_bytes: int) -> Iterator[Span]:
    """Divide bytes of a block into spans, each of which is read into *most_bytes* at most.

    Args:
        first: first byte in the block.
        nbytes: how many.
        start: first byte in the slot.
        most_bytes: a multiple of :data:`~hf_pyao.engine.stores.disk_blocks.CHUNK_BYTES`.
    """
    last = first + nbytes
    at = first
    while at < last:
        end = min(at // CHUNK_BYTES * CHUNK_BYTES + most_bytes, last)
        yield Span(at, end - at, start + at - first)
        at = end
