"""Where the streamed weights of a model are on the host, and what that takes of the budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

import torch

from hf_pyao.auto.install.streaming_checks import no_room
from hf_pyao.config import GIB
from hf_pyao.engine.stores import Store
from hf_pyao.engine.stores.host_share import ranks_of_node
from hf_pyao.engine.stores.mapped_files import MappedFiles
from hf_pyao.engine.stores.shared_memory import SharedMemory
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.errors import warn
from hf_pyao.model.weights.shared_weights import SharedWeights
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)


class WeightsOnHost:
    """Puts the weights of layers into host memory, and counts them.

    Weights that lie together already stay where they are: those that were streamed before, and
    those whose memory several processes share, which count by this process's part.

    Args:
        store: host memory.
        shared: which of the model's memory is shared; None for none.
    """

    def __init__(self, store: Store, shared: SharedWeights | None) -> None:
        self._store = store
        self._shared = shared
        self._mapped_files = MappedFiles()

    def check_room(
        self,
        label: str,
        of_layers: Sequence[Masters],
        of_ends: Sequence[Masters],
        more_bytes: int = 0,
    ) -> None:
        """Refuse weights for which there is no room; say what several copies of them come to.

        Args:
            label: how messages call the setting.
            of_layers: weights of layers.
            of_ends: those of embeddings and head.
            more_bytes: what weights on the disk are read into.

        Raises:
            ConfigError: there is no room.
        """
        found = [*of_layers, *of_ends]
        room = self.room_for(found)
        needed = more_bytes + sum(map(self._counted_bytes, found))
        if needed > room:
            raise no_room(
                label,
                len(of_layers),
                needed,
                room,
                with_ends=bool(of_ends),
                with_staging=bool(more_bytes),
            )
        num_ranks, counted_by = ranks_of_node(os.environ)
        nbytes = sum(each.nbytes for each in found if self._file_of(each) is None)
        if num_ranks > 1 and nbytes and process_rank().is_first:
            warn(
                logger,
                "weights-copied-per-process",
                "each of the %d processes of this node (%s) holds its own copy of the streamed "
                "weights: %.3f GiB of host memory each, %.3f GiB together. They have one copy if "
                "the model is loaded inside of `with hf_pyao.one_copy_per_node():`.",
                num_ranks,
                counted_by,
                nbytes / GIB,
                nbytes * num_ranks / GIB,
            )

    def room_for(self, found: Sequence[Masters]) -> int:
        """Return the host memory that *found* may have, which leave the memory that they are in."""
        return self._store.room_to_reserve(sum(map(self._in_place_bytes, found)))

    def let_go(self, tensor: torch.Tensor) -> None:
        """Let go of the pages of a mapped file that *tensor* lies in."""
        self._mapped_files.let_go(tensor)

    def _in_place_bytes(self, masters: Masters) -> int:
        """Return what weights take of host memory now: none where they lie in a mapped file."""
        return sum(
            master.nbytes
            for master in masters.masters
            if (parameter := master.ref()) is not None
            and parameter.device.type == "cpu"
            and not self._mapped_files.has(parameter)
        )

    def take(self, masters: Masters) -> bool:
        """Let *masters* have memory on the host; False if there is none."""
        if not self._leave_in_place(masters):
            in_place = self._in_place_bytes(masters)
            memory = self._store.reserve(masters.nbytes, in_place_of_bytes=in_place)
            if memory is None:
                return False
            masters.move_to(memory, self._mapped_files.let_go)
        return True

    def give_back(self, masters: Masters) -> None:
        """Count the memory of *masters* no longer, whoever still reads it."""
        if masters.memory is not None:
            self._store.return_reserved(masters.memory)

    def taken_bytes(self, found: Iterable[Masters]) -> int:
        """Return what *found* take of the store's capacity now."""
        memory = [each.memory for each in found if each.memory is not None]
        return sum(map(self._store.taken_bytes, memory))

    def num_processes(self, found: Sequence[Masters]) -> int:
        """Return how many processes have one copy of the weights, this one included."""
        if self._shared is None or not all(map(self._file_of, found)):
            return 1
        return self._shared.num_processes

    def _leave_in_place(self, masters: Masters) -> bool:
        """Let *masters* stay where they lie, if uploads may read them there; else return False.

        Where the device needs page-locked memory, uploads of shared weights read a mapping of
        their own; see [Note: Shared weights] in ``../../model/weights/shared_weights.py``.
        """
        memory = masters.lies_in
        if memory is None:
            return False
        twin = None
        if self._store.is_pinned and not memory.is_pinned():
            file = self._file_of(masters)
            twin = None if file is None else file.shared()
            if twin is None or not self._store.page_lock(twin):
                return False
        in_place = self._in_place_bytes(masters)
        nbytes = self._counted_bytes(masters)
        if not self._store.count_in(memory, nbytes, in_place_of_bytes=in_place):
            return False
        masters.stay(twin)
        return True

    def _file_of(self, masters: Masters) -> SharedMemory | None:
        if self._shared is None or masters.lies_in is None:
            return None
        return self._shared.file_of(masters.lies_in.untyped_storage())

    def _counted_bytes(self, masters: Masters) -> int:
        """Return the bytes that are to count for this process, beside those that do already."""
        if masters.lies_in is not None and self._store.counts(masters.lies_in):
            return 0
        shared = self._shared
        if shared is None or self._file_of(masters) is None:
            return masters.nbytes
        return -(-masters.nbytes // shared.num_processes)
