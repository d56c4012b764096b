"""Where the streamed weights of a model are: in host memory, or in a file on a disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

import torch
from torch import nn

from hf_pyao.auto.install.streaming_checks import StreamingSettings, no_room
from hf_pyao.auto.install.weights_on_disk import WeightsOnDisk
from hf_pyao.config import GIB
from hf_pyao.engine.stores.host_share import ranks_of_node
from hf_pyao.engine.stores.mapped_files import MappedFiles
from hf_pyao.engine.stores.shared_memory import SharedMemory
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.errors import warn
from hf_pyao.model.weights.shared_weights import shared_weights_of
from hf_pyao.model.weights.streamable import StreamableLayer
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)


class WeightMemory:
    """The memory of each layer's weights, and of embeddings and head; what it takes of the host.

    Layers are told by their position in the model. Weights that lie together already stay where
    they are: those that were streamed before, and those whose memory several processes share, which
    count by this process's part. Making one changes nothing.

    Args:
        model: the whole model.
        layers: all layers, with what of them can be streamed.
        link: transport and host memory.
        device: where compute runs.
        settings: where weights lie for which the host has no room.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[StreamableLayer],
        link: LinkContext,
        device: torch.device,
        settings: StreamingSettings,
    ) -> None:
        self._store = store = link.tiers.stores[0]
        self._shared = shared_weights_of(model)
        self._mapped_files = MappedFiles()
        self.disk = WeightsOnDisk(
            settings.disk_path, settings.disk_label, store, link.transport, self._mapped_files
        )
        """Those that lie on the disk. While there are some, all layers keep their places."""
        self._homes = [layer.tensors[0][1].device if layer.tensors else device for layer in layers]
        """Where each layer's frozen weights were before."""
        self.held: dict[int, Masters] = {}
        """By layer, its weights that are streamed; those without memory are about to be."""

    @property
    def taken_bytes(self) -> int:
        """What the weights of layers take of the capacity of the host's store now."""
        memory = [each.memory for each in self.held.values() if each.memory is not None]
        return self.disk.taken_bytes + sum(map(self._store.taken_bytes, memory))

    def num_processes(self, found: Sequence[Masters]) -> int:
        """Return how many processes have one copy of the weights, this one included."""
        if self._shared is None or not all(map(self._file_of, found)):
            return 1
        return self._shared.num_processes

    def plan(
        self,
        layers: Sequence[StreamableLayer],
        streamed: Collection[int],
        ends: Sequence[Masters] = (),
    ) -> None:
        """Have the *streamed* layers leave the device, and choose which go to the disk.

        Args:
            layers: all layers of the model, as they are now.
            streamed: which are streamed.
            ends: embeddings and head that are on the host, too.
        """
        new = sorted(set(streamed) - set(self.held))
        if self.disk.is_given:
            found = {number: Masters(layers[number].fqn, layers[number].tensors) for number in new}
            room = self._room_for([*found.values(), *ends]) - sum(each.nbytes for each in ends)
            self.disk.choose({layer: masters.nbytes for layer, masters in found.items()}, room)
        for number in new:
            fqn, tensors = layers[number].fqn, layers[number].tensors
            self.held[number] = Masters(
                fqn, tensors, home=self._homes[number], lie_in_order=self._is_for_disk(number)
            )
        self.held = dict(sorted(self.held.items()))

    # ---- what goes where -----------------------------------------------------------------------

    def check_room(self, label: str, ends: Sequence[Masters]) -> None:
        """Refuse weights for which there is no room.

        Args:
            label: how messages call the setting.
            ends: weights of embeddings and head.

        Raises:
            ConfigError: there is no room.
        """
        found = self._on_host(ends)
        room, needed = self._room_for(found), self.needed_bytes(ends)
        if needed > room:
            raise no_room(label, len(found) - len(ends), needed, room)

    def needed_bytes(self, ends: Sequence[Masters]) -> int:
        """Return what the weights take of the host beside what counts already, *ends* included."""
        return self.disk.share.reserved_bytes + sum(map(self._counted_bytes, self._on_host(ends)))

    def _on_host(self, ends: Sequence[Masters]) -> list[Masters]:
        of_layers = [each for layer, each in self.held.items() if not self._is_for_disk(layer)]
        return [*of_layers, *ends]

    def tell_of_copies(self, found: Sequence[Masters]) -> None:
        """Say what the copies of *found* come to, of which each process of the node has one."""
        num_ranks, counted_by = ranks_of_node(os.environ)
        nbytes = sum(
            each.nbytes for each in found if self._file_of(each) is None and not each.in_file
        )
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

    def _is_for_disk(self, layer: int) -> bool:
        """Say whether a layer is on the disk, or is to be when it is streamed."""
        if (held := self.held.get(layer)) is not None and held.memory is not None:
            return held.in_file is not None
        return layer in self.disk.share.layers

    def _room_for(self, found: Sequence[Masters]) -> int:
        """Return the host memory that *found* may have, which leave the memory that they are in."""
        return self._store.room_to_reserve(sum(map(self._in_place_bytes, found)))

    def _in_place_bytes(self, masters: Masters) -> int:
        """Return what weights take of host memory now: none where they lie in a mapped file."""
        return sum(
            master.nbytes
            for master in masters.masters
            if (parameter := master.ref()) is not None
            and parameter.device.type == "cpu"
            and not self._mapped_files.has(parameter)
        )

    def _counted_bytes(self, masters: Masters) -> int:
        """Return the bytes that are to count for this process, beside those that do already."""
        if masters.lies_in is not None and self._store.counts(masters.lies_in):
            return 0
        shared = self._shared
        if shared is None or self._file_of(masters) is None:
            return masters.nbytes
        return -(-masters.nbytes // shared.num_processes)

    def _file_of(self, masters: Masters) -> SharedMemory | None:
        if self._shared is None or masters.lies_in is None:
            return None
        return self._shared.file_of(masters.lies_in.untyped_storage())

    # ---- moving --------------------------------------------------------------------------------

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

    def move_off_device(self, layer: int, layers: Sequence[StreamableLayer]) -> bool:
        """Let the weights of *layer* lie on the disk or the host; False if there is no room.

        Args:
            layer: its position; it is planned.
            layers: all layers of the model, as they are now.

        Raises:
            ConfigError: the disk cannot be used.
            DiskError: the file cannot be written or read.
        """
        masters = self.held[layer]
        is_on_disk = self._is_for_disk(layer) and self.disk.take(masters, layers)
        return is_on_disk or self.take(masters)

    def leave_planned(self) -> None:
        """Have layers stay that were planned, and for whose weights there is no room."""
        self.held = {layer: each for layer, each in self.held.items() if each.memory is not None}
        self.forget_unused_disk()

    def forget_unused_disk(self) -> None:
        """Have no weights go to the disk, where none lie there yet."""
        if not any(held.in_file is not None for held in self.held.values()):
            self.disk.forget()

    def move_to_device(self, layer: int, device: torch.device) -> bool:
        """Let the weights of a streamed layer stay on *device*; False if there is no room."""
        masters = self.held[layer]
        try:
            copies = masters.copies_on(device)
        except torch.OutOfMemoryError:
            return False
        self.give_back(self.held.pop(layer))
        masters.leave_for(copies)
        return True
