"""Blocks that cross the link in int8, and whose noise comes back in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hf_pyao.engine.codecs.base import flatten
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.weights.blocks import Weight
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.noise import NoiseKey
from hf_pyao.engine.zeroth_order.perturbation import CHUNK_ELEMENTS, Draw
from hf_pyao.engine.zeroth_order.trained import TrainedWeights


class _Place(NamedTuple):
    """Where a weight is among the packed bytes."""

    first: int
    nbytes: int
    is_packed: bool


class PackedBlock(VisitBlock):
    """Weights of a layer in int8; see [Note: Fewer bytes].

    A slot has the packed weights, and behind them the noise of the trained ones, each at the place
    that its weight has. The host has memory of its own for one of both: weights to be uploaded, or
    noise that has come back. Momentum stays on the host.

    Args:
        index: its number among the blocks, in forward order.
        masters: the weights on the host.
        trained: all trained weights of the model.
    """

    def __init__(self, index: int, masters: Masters, trained: TrainedWeights) -> None:
        super().__init__(index, masters, trained)
        self._all_trained = trained
        self._places: dict[Weight, _Place] = {}
        self._is_trained = {weight for weight, _ in self.trained}
        end = 0
        for weight in self._by_offset:
            is_packed = int8_transfer.packs(weight.size, weight.dtype)
            nbytes = int8_transfer.packed_nbytes(weight.size) if is_packed else weight.nbytes
            self._places[weight] = _Place(end, nbytes, is_packed)
            if weight in self._is_trained:
                nbytes = max(nbytes, weight.size.numel())
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
        self._noise_step: int | None = None
        """The step whose noise is in the memory, or on its way there; None: there is none."""

    def give_packed_memory(self, memory: torch.Tensor) -> None:
        """Let uploads read *memory*, and noise come back there."""
        self.packed_memory = memory

    def note_change(self, *, of_frozen: bool) -> None:
        """Note that trained weights, and frozen ones perhaps, are others than the memory has."""
        self.is_filled = False
        self._has_frozen &= not of_frozen

    def fill(self) -> None:
        """Write to the memory what it does not have yet. No copy may read or write it."""
        self.is_filled, self._noise_step = False, None
        for weight, place in self._places.items():
            on_host = weight.on_host()
            if on_host is None or (self._has_frozen and weight not in self._is_trained):
                continue
            memory = self._on_host_at(place.first, place.nbytes)
            if place.is_packed:
                int8_transfer.pack(on_host.detach(), memory)
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
            end = place.first + weight.size.numel()
            is_beside = True
        if first >= 0:
            yield self.packed_nbytes + first, self._on_host_at(first, end - first)

    def read(
        self, weight: Weight, storage: torch.UntypedStorage, device: torch.device
    ) -> torch.Tensor:
        """Return *weight* of a slot in its dtype: a new tensor, or a view if it is not packed."""
        place = self._places[weight]
        memory = bytes_view(storage, device, place.first, place.first + place.nbytes)
        if place.is_packed:
            return int8_transfer.unpack(memory, weight.size, weight.dtype)
        return memory.view(weight.dtype).view(weight.size)

    def draw_noise(self, storage: torch.UntypedStorage, device: torch.device) -> Callable[[], None]:
        """Draw the noise of the step that runs into a slot.

        Returns:
            What notes that a copy to the host was queued.
        """
        self.is_filled, self._noise_step = False, None
        step = self._all_trained.num_steps
        for weight, part in self.trained:
            memory = self._noise_in_slot(weight, storage, device)
            for first in range(0, part.num_elements, CHUNK_ELEMENTS):
                end = min(first + CHUNK_ELEMENTS, part.num_elements)
                z = self._all_trained.draw(part.key, step, first, end, device)
                int8_transfer.pack_noise(z, memory[first:end])

        def note() -> None:
            self._noise_step = step

        return note

    def draw_from_slot(
        self, weight: Weight, storage: torch.UntypedStorage, device: torch.device
    ) -> Draw:
        """Return what gives the noise of a trained weight in this step, which is in a slot."""
        memory = self._noise_in_slot(weight, storage, device)
        return functools.partial(self._drawn, memory, self._all_trained.num_steps)

    def draw_on_host(self, weight: Weight) -> Draw:
        """Return what gives the noise of a trained weight on the host.

        That of a step that has not come back is drawn: it has the same bits.
        """
        memory = self._on_host_at(self._places[weight].first, weight.size.numel())
        return functools.partial(self._drawn, memory, self._noise_step)

    def _drawn(
        self,
        memory: torch.Tensor,
        step_in_memory: int | None,
        key: NoiseKey,
        step: int,
        first: int,
        end: int,
        device: torch.device,
    ) -> torch.Tensor:
        if step != step_in_memory:
            return self._all_trained.draw(key, step, first, end, device)
        return int8_transfer.unpack_noise(memory[first:end])

    def _noise_in_slot(
        self, weight: Weight, storage: torch.UntypedStorage, device: torch.device
    ) -> torch.Tensor:
        first = self.packed_nbytes + self._places[weight].first
        return bytes_view(storage, device, first, first + weight.size.numel())

    def _on_host_at(self, first: int, nbytes: int) -> torch.Tensor:
        assert self.packed_memory is not None
        return self.packed_memory[first : first + nbytes]
