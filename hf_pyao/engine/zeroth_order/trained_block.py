"""Blocks whose weights are trained: what of them is on the host, and what in a slot.

With momentum the float32 momentum of each trained weight travels behind the weights. Blocks of a
``transfer_dtype`` travel as [Note: Fewer bytes] says: up go weights in int8, back comes noise.

=========  =======================================================================
host       weights, momentum, and what crosses the link if that is something else
slot       weights, momentum; or weights in int8, and the noise of one step in int8
=========  =======================================================================
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.weights.blocks import Block, Weight
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.perturbation import Draw, chunks
from hf_pyao.engine.zeroth_order.trained import TrainedWeights

_STATE_BYTES = 4
"""Of an element of momentum."""
_NOTHING = -1


class TrainedBlock(Block):
    """The weights of a layer, which come to the device together and go back if they are trained.

    Args:
        index: its number among the blocks, in forward order.
        masters: the weights on the host.
        trained: all trained weights of the model.
    """

    def __init__(self, index: int, masters: Masters, trained: TrainedWeights) -> None:
        super().__init__(index, masters)
        self._all_trained = trained
        found = [(weight, trained.of(weight.ref())) for weight in self.weights]
        self.trained = [(weight, known) for weight, known in found if known is not None]
        self.is_packed = trained.settings.transfer_dtype is not None
        self.holds: int | None = _NOTHING
        """What the memory has that crosses the link: None: the weights in int8; else the step whose
        noise it has, and the slot too."""
        self._states: dict[Weight, int] = {}
        """By trained weight, the first byte of its momentum, on the host and in a slot."""
        end = aligned(masters.nbytes)
        for weight, known in self.trained if trained.settings.momentum else ():
            self._states[weight] = end
            end += aligned(_STATE_BYTES * known.num_elements)
        self.nbytes = self.host_nbytes = self._packed_from = end
        self._packed: dict[Weight, int] = {}
        """By weight, its first byte in int8, and that of its noise, among what crosses the link."""
        self._packed_nbytes = 0
        if self.is_packed:
            for weight in self.weights:
                self._packed[weight] = self._packed_nbytes
                self._packed_nbytes += aligned(
                    int8_transfer.packed_nbytes(weight.size, weight.dtype)
                )
            self.host_nbytes += self._packed_nbytes
            self.nbytes = self._packed_nbytes * (1 + bool(self.trained))
        self._host = torch.empty(0, dtype=torch.uint8)

    def move_to(self, memory: torch.Tensor) -> None:
        """Have the weights, and zeros for the momentum, in *memory*.

        Args:
            memory: uint8, (:attr:`host_nbytes`,), on the host.
        """
        self._host = memory
        self.masters.move_to(memory[: self.masters.nbytes])
        memory[self.masters.nbytes :].zero_()
        for weight, known in self.trained:
            known.give_state(self.state(weight))

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: first byte in the slot, and uint8 bytes on the host."""
        first = self._packed_from if self.is_packed else 0
        end = self.host_nbytes if self.is_packed else self.nbytes
        yield 0, self._host[first:end]

    def pieces_back(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what goes back: first byte in the slot, and bytes on the host."""
        if len(self.trained) == len(self.weights):  # all of it, or all noise: it lies together
            start = self._packed_nbytes
            first = self._packed_from if self.is_packed else 0
            yield start, self._host[first:][: self.nbytes - start]
            return
        for weight, known in self.trained:
            if self.is_packed:
                first, nbytes = self._packed[weight], known.num_elements
                yield self._packed_nbytes + first, self._host[self._packed_from + first :][:nbytes]
                continue
            yield weight.offset, self._host[weight.offset :][: weight.nbytes]
            if (state := self.state(weight)) is not None:
                yield self._states[weight], state.view(torch.uint8)

    def state(self, weight: Weight, slot: DeviceBlock | None = None) -> torch.Tensor | None:
        """Return the momentum of a trained weight, on the host or in *slot*; None without."""
        if weight not in self._states:
            return None
        memory = self._host if slot is None else _bytes_of(slot)
        nbytes = _STATE_BYTES * weight.size.numel()
        return memory[self._states[weight] :][:nbytes].view(torch.float32)

    def read(self, weight: Weight, slot: DeviceBlock) -> torch.Tensor:
        """Return *weight* in its dtype: a view of *slot*, or a new tensor of what is packed."""
        if not self.is_packed:
            return slot.plain(weight)
        return int8_transfer.unpack(
            _bytes_of(slot)[self._packed[weight] :], weight.size, weight.dtype
        )

    # ---- with a transfer_dtype -----------------------------------------------------------------

    def pack(self, *, also_frozen: bool) -> None:
        """Write the weights to what crosses the link; noise there is lost. No copy may use it.

        Args:
            also_frozen: those, which noise does not overwrite, too.
        """
        also_frozen |= self.holds == _NOTHING
        self.holds = _NOTHING
        chosen = self.weights if also_frozen else [weight for weight, _ in self.trained]
        for weight in chosen:
            if (parameter := weight.ref()) is not None:
                memory = self._host[self._packed_from + self._packed[weight] :]
                int8_transfer.pack(parameter.detach(), memory)
        self.holds = None

    def draw_noise(self, slot: DeviceBlock) -> None:
        """Draw the noise of the step that runs into *slot*; call :meth:`note_noise` behind that."""
        self.holds = _NOTHING
        for weight, known in self.trained:
            codes = self._noise(weight, slot)
            for first, end in chunks(known.num_elements):
                z = self._all_trained.draw(
                    known.key, self._all_trained.num_steps, first, end, slot.device
                )
                int8_transfer.pack_noise(z, codes[first:end])

    def note_noise(self) -> None:
        """Note that the noise of the step that runs is in a slot, and on its way to the host."""
        self.holds = self._all_trained.num_steps

    def drawn(self, weight: Weight, slot: DeviceBlock | None = None) -> Draw:
        """Return what gives the noise of a trained weight, as it is in *slot* or on the host.

        That of another step is drawn: it has the same bits.
        """
        codes = self._noise(weight, slot)

        def draw(
            key: object, step: int, first: int, end: int, device: torch.device
        ) -> torch.Tensor:
            if step != self.holds:
                return self._all_trained.draw(key, step, first, end, device)
            return int8_transfer.unpack_noise(codes[first:end])

        return draw

    def _noise(self, weight: Weight, slot: DeviceBlock | None) -> torch.Tensor:
        memory = self._host if slot is None else _bytes_of(slot)
        first = self._packed_from if slot is None else self._packed_nbytes
        return memory[first + self._packed[weight] :][: weight.size.numel()]


def _bytes_of(slot: DeviceBlock) -> torch.Tensor:
    return bytes_view(slot.storage, slot.device, 0, slot.storage.nbytes())
