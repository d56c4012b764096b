"""Where the streamed weights of a model's layers are: in host memory, or in a file on a disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from hf_pyao.auto.install.weights_on_disk import WeightsOnDisk
from hf_pyao.auto.install.weights_on_host import WeightsOnHost
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.weights.read_ahead import ReadAhead
from hf_pyao.errors import ConfigError, DiskError, warn
from hf_pyao.model.weights.shared_weights import shared_weights_of
from hf_pyao.model.weights.streamable import StreamableLayer
from hf_pyao.plan.step.disk_share import PlacedWeights

logger = logging.getLogger(__name__)


class LayerWeights:
    """The memory of each layer's weights. Layers are told by their position in the model.

    Making one changes nothing.

    Args:
        model: the whole model.
        layers: all layers, with what of them can be streamed.
        link: transport and host memory.
        device: where compute runs.
        disk_path: where weights lie for which the host has no room; None: they are refused.
        disk_label: how messages call that setting.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[StreamableLayer],
        link: LinkContext,
        device: torch.device,
        *,
        disk_path: str | os.PathLike[str] | None = None,
        disk_label: str = "disk_path",
    ) -> None:
        store = link.tiers.stores[0]
        self.on_host = WeightsOnHost(store, shared_weights_of(model))
        self._on_disk: WeightsOnDisk | None = None
        if disk_path is not None:
            self._on_disk = WeightsOnDisk(
                disk_path, disk_label, store, link.transport, self.on_host.let_go
            )
        self._positions = {layer.fqn: position for position, layer in enumerate(layers)}
        self._homes = [layer.tensors[0][1].device if layer.tensors else device for layer in layers]
        """Where each layer's frozen weights were before."""
        self._held: dict[int, Masters] = {}

    @property
    def held(self) -> Mapping[int, Masters]:
        """By layer, the memory that its weights are in now; none of layers that stay."""
        return self._held

    @property
    def has_disk(self) -> bool:
        """Whether weights may lie on a disk."""
        return self._on_disk is not None

    @property
    def placed_on_disk(self) -> PlacedWeights | None:
        """The layers that lie on the disk, and what they are read into; None while none do.

        While there are some, all layers keep their places.
        """
        return None if self._on_disk is None else self._on_disk.placed

    @property
    def disk_read_gib_per_s(self) -> float | None:
        """Speed at which the disk was read so far, in GiB/s; None: it was not."""
        return None if self._on_disk is None else self._on_disk.read_gib_per_s

    @property
    def taken_bytes(self) -> int:
        """What the weights take of the capacity of the host's store now."""
        of_reads = 0 if self._on_disk is None else self._on_disk.taken_bytes
        return self.on_host.taken_bytes(self._held.values()) + of_reads

    def position_of(self, masters: Masters) -> int:
        """Return which layer the weights are of."""
        return self._positions[masters.layer]

    def masters_of(
        self, layers: Sequence[StreamableLayer], streamed: Collection[int]
    ) -> list[Masters]:
        """Return the masters of the *streamed* layers; those that are held keep their memory."""
        found: list[Masters] = []
        for layer in sorted(streamed):
            tensors = layers[layer].tensors
            masters = Masters(
                layers[layer].fqn,
                tensors,
                home=self._homes[layer],
                lie_in_order=self._is_for_disk(layer),
            )
            held = self._held.get(layer)
            if held is not None and held.has(tensors):
                masters.go_on_from(held)
            found.append(masters)
        return found

    def find_again(self, layers: Sequence[StreamableLayer]) -> list[Masters]:
        """Return the masters of the layers that are held, by their parameters of now."""
        found = self.masters_of(layers, self._held)
        self._held = {self.position_of(masters): masters for masters in found}
        return found

    # ---- what goes where -----------------------------------------------------------------------

    def choose_for_disk(
        self,
        layers: Sequence[StreamableLayer],
        streamed: Sequence[int],
        ends: Sequence[Masters] = (),
    ) -> None:
        """Choose which of the *streamed* layers lie on the disk, beside *ends* on the host."""
        if self._on_disk is None:
            return
        found = self.masters_of(layers, streamed)
        room = self.on_host.room_for([*found, *ends]) - sum(each.nbytes for each in ends)
        self._on_disk.choose({self.position_of(m): m.nbytes for m in found}, room)

    def check_room(self, label: str, found: Sequence[Masters], ends: Sequence[Masters]) -> None:
        """Refuse weights for which the host has no room, as :meth:`WeightsOnHost.check_room`."""
        on_host = [each for each in found if not self._is_for_disk(self.position_of(each))]
        staging_bytes = 0 if self._on_disk is None else self._on_disk.share.reserved_bytes
        self.on_host.check_room(label, on_host, ends, staging_bytes)

    def _is_for_disk(self, layer: int) -> bool:
        """Say whether a layer is on the disk, or is to be when it is streamed."""
        if (held := self._held.get(layer)) is not None:
            return held.in_file is not None
        return self._on_disk is not None and self._on_disk.is_chosen(layer)

    # ---- moving --------------------------------------------------------------------------------

    def move_off_device(
        self, masters: Masters, layers: Sequence[StreamableLayer], *, is_new: bool
    ) -> bool:
        """Let *masters* lie on the disk or have memory on the host; False if there is none.

        Args:
            masters: weights of a layer.
            layers: all layers of the model, as they are now.
            is_new: nothing is streamed yet.
        """
        layer = self.position_of(masters)
        is_for_disk = self._is_for_disk(layer)
        self._release(layer)
        is_taken = False
        if is_for_disk and self._on_disk is not None:
            is_taken = self._on_disk.take(masters, layers, is_new=is_new)
        if not is_taken and not self.on_host.take(masters):
            return False
        self._held[layer] = masters
        return True

    def move_to_disk(self, layers: Sequence[StreamableLayer], new: Sequence[int]) -> None:
        """Put those of the *new* layers on the disk for which the host has no room.

        Those that the disk does not take stay where they are.
        """
        on_disk = self._on_disk
        if on_disk is None:
            return
        self.choose_for_disk(layers, new)
        for masters in self.masters_of(layers, [each for each in new if self._is_for_disk(each)]):
            try:
                if on_disk.take(masters, layers, is_new=True):
                    self._held[self.position_of(masters)] = masters
            except (ConfigError, DiskError) as error:
                if not any(held.in_file is not None for held in self._held.values()):
                    on_disk.forget()
                warn(
                    logger,
                    "weights-stay",
                    "the weights of layer %r do not go to the disk, for which the host has no "
                    "room: they stay on the device (%s).",
                    masters.layer,
                    error,
                )
                return

    def move_to_device(self, layer: int, device: torch.device) -> bool:
        """Let the weights of a streamed layer stay on *device*; False if there is no room."""
        masters = self._held[layer]
        try:
            copies = masters.copies_on(device)
        except torch.OutOfMemoryError:
            return False
        self._release(layer)
        masters.leave_for(copies)
        return True

    def _release(self, layer: int) -> None:
        """Give the host memory of a layer back to the store, whoever still reads it."""
        if (held := self._held.pop(layer, None)) is not None:
            self.on_host.give_back(held)

    # ---- reads ---------------------------------------------------------------------------------

    def read_ahead(self, found: Sequence[Masters], counts: UploadFigures) -> ReadAhead | None:
        """Return what reads those of *found* that are on the disk; None if none are."""
        return None if self._on_disk is None else self._on_disk.read_ahead(found, counts)

    def release_reads(self) -> None:
        """Give the host memory for reads back to the store. It may be called again."""
        if self._on_disk is not None:
            self._on_disk.release()

    def describe_disk(self, found: Sequence[Masters]) -> str:
        """Say in a phrase what of *found* is on the disk; empty for nothing."""
        return "" if self._on_disk is None else self._on_disk.describe(found)
