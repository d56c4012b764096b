"""Blocks that cross the link in a format of fewer bytes, and whose noise comes back in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hf_pyao.engine.codecs.base import flatten
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.weights.blocks import Weight
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.perturbation import Draw
from hf_pyao.engine.zeroth_order.trained import TrainedWeights


class _Place(NamedTuple):
    """Where a weight is among the packed bytes."""

    first: int
    nbytes: int
    is_packed: bool


class PackedBlock(VisitBlock):
    """Weights of a layer in a :class:`TransferFormat`; see [Note: Fewer bytes].

    A slot has the packed weights, and behind them the noise of the trained ones, each at the place
    that its weight has. The host has memory of its own for one of both: weights to be uploaded, or
    noise that has come back. Momentum stays on the host.

    Args:
        index: its number among the blocks, in forward order.
        masters: the weights on the host.
        trained: all trained weights of the model, with a format.
    """

    def __init__(self, index: int, masters: Masters, trained: TrainedWeights) -> None:
        super().__init__(index, masters, trained)
        assert trained.format is not None
        self._trained_weights = trained
        self._format = trained.format
        self._places: dict[Weight, _Place] = {}
        self._is_trained = {weight for weight, _ in self.trained}
        end = 0
        for weight in self._by_offset:
            is_packed = self._format.packs(weight.size, weight.dtype)
            nbytes = self._format.packed_nbytes(weight.size) if is_packed else weight.nbytes
            self._places[weight] = _Place(end, nbytes, is_packed)
            if weight in self._is_trained:
                nbytes = max(nbytes, self._format.noise_itemsize * weight.size.numel())
            end = aligned(end + nbytes)
        self.packed_nbytes = end
        """Bytes of the packed weights, and of the memory on the host."""
        self.nbytes = 2 * end if self.trained else end
        self.packed_memory: torch.Tensor | None = None
        """uint8, on the host, shape (:attr:`packed_nbytes`,)."""
        self.is_filled = False
        """Whether the memory has the packed weights as they are."""
        self._has_frozen = False
        """Whether it has the frozen ones, which noise does not overwrite."""
        self.noise_step: int | None = None
        """The step whose noise is in the memory, or on its way there; None: there is none."""

    def give_packed_memory(self, memory: torch.Tensor) -> None:
        """Let uploads read *memory*, and noise come back there."""
        self.packed_memory = memory
        self.note_change()
        self.noise_step = None

    def note_change(self) -> None:
        """Note that weights, frozen ones too, may be others than the memory has."""
        self.is_filled = self._has_frozen = False

    def note_update(self) -> None:
        """Note that trained weights are updated on the host: the memory has them as before."""
        self.is_filled = False

    def note_noise(self, step: int | None) -> None:
        """Note that the memory has noise, or is to have it: that of *step*; None: a part of it."""
        self.is_filled, self.noise_step = False, step

    def fill(self) -> None:
        """Write to the memory what it does not have yet. No copy may read or write it."""
        self.is_filled, self.noise_step = False, None
        for weight, place in self._places.items():
            on_host = weight.on_host()
            if on_host is None or (self._has_frozen and weight not in self._is_trained):
                continue
            memory = self._on_host_at(place.first, place.nbytes)
            if place.is_packed:
                self._format.pack(on_host.detach(), memory)
            else:
                memory.view(weight.dtype).copy_(flatten(on_host))
        self.is_filled = self._has_frozen = True

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: the packed weights."""
        yield 0, self._on_host_at(0, self.packed_nbytes)

    def runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what goes back to the host: the noise of trained weights, in runs."""
        first = end = -1
        is_beside = False
        for weight, place in self._places.items():
            if weight not in self._is_trained:
                is_beside = False
                continue
            if first >= 0 and not is_beside:
                yield self.packed_nbytes + first, self._on_host_at(first, end - first)
            first = first if is_beside else place.first
            end = place.first + self._format.noise_itemsize * weight.size.numel()
            is_beside = True
        if first >= 0:
            yield self.packed_nbytes + first, self._on_host_at(first, end - first)

    def unpacked(
        self, storage: torch.UntypedStorage, device: torch.device, weight: Weight
    ) -> torch.Tensor:
        """Return *weight* of a slot in its dtype: a new tensor, or a view if it is not packed."""
        place = self._places[weight]
        memory = bytes_view(storage, device, place.first, place.first + place.nbytes)
        if place.is_packed:
            return self._format.unpack(memory, weight.size, weight.dtype)
        return memory.view(weight.dtype).view(weight.size)

    def noise_in_slot(
        self, storage: torch.UntypedStorage, device: torch.device, weight: Weight
    ) -> torch.Tensor:
        """Return the memory of a trained weight's noise in a slot, uint8."""
        first = self.packed_nbytes + self._places[weight].first
        nbytes = self._format.noise_itemsize * weight.size.numel()
        return bytes_view(storage, device, first, first + nbytes)

    def draw_from(self, weight: Weight, memory: torch.Tensor | None = None) -> Draw:
        """Return what gives the noise of a trained weight.

        Args:
            weight: which one.
            memory: has its noise of every step that is asked for; None: the memory on the host has
                that of :attr:`noise_step`, and noise of other steps is drawn.
        """
        itemsize = self._format.noise_itemsize
        if memory is None:
            nbytes = itemsize * weight.size.numel()
            kept, step_kept = self._on_host_at(self._places[weight].first, nbytes), self.noise_step
        else:
            kept, step_kept = memory, None

        def draw(key: object, step: int, first: int, end: int, device: object) -> torch.Tensor:
            if memory is None and step != step_kept:
                return self._trained_weights.draw(key, step, first, end, device)  # type: ignore[arg-type]
            return self._format.unpack_noise(kept[itemsize * first : itemsize * end])

        return draw

    def _on_host_at(self, first: int, nbytes: int) -> torch.Tensor:
        assert self.packed_memory is not None
        return self.packed_memory[first : first + nbytes]
