"""The trained weights of one model: the step that each is still to be updated by, and their blocks.

With momentum the float32 momentum of each trained weight travels behind the weights. Blocks of a
``transfer_dtype`` travel as [Note: Fewer bytes] says: up go weights in int8, back comes noise.

=====  =======================================================================
host   weights, momentum; with a ``transfer_dtype`` what crosses the link, too
slot   weights, momentum; or weights in int8, and the noise of one step in int8
=====  =======================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.weights.blocks import Block, Weight
from hf_pyao.engine.weights.device_block import DeviceBlock
from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.weights.masters import Masters
from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.noise import NoiseKey, noise
from hf_pyao.engine.zeroth_order.perturbation import (
    Draw,
    PastStep,
    ZerothOrderSettings,
    chunks,
    perturbed,
    update,
)

_STATE_BYTES = 4
"""Of an element of momentum."""


class TrainedWeight:
    """One parameter that is trained, however many modules have it.

    Args:
        name: its first name in the model.
        parameter: held weakly.
        seed: of the noise.
    """

    def __init__(self, name: str, parameter: torch.Tensor, seed: int) -> None:
        self.name = name
        self.ref = weakref.ref(parameter)
        self.key = NoiseKey.of(seed, name)
        self.num_elements = parameter.numel()
        self.num_applied = 0
        """How many steps it has been updated by."""
        self.state: torch.Tensor | None = None
        """The momentum, float32, (num_elements,), where the weight lives; None without momentum,
        and before it is given memory."""


class TrainedWeights:
    """All trained weights of a model, and the last step.

    A weight is updated when it is read next. So the last step is kept until the next one is over,
    by when every weight has been updated by it.

    Args:
        parameters: name and parameter; each parameter once.
        settings: scale, momentum and seed.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], settings: ZerothOrderSettings
    ) -> None:
        self.settings = settings
        self._steps: tuple[int, PastStep | None] = (0, None)
        """How many steps are over, and the last one that changes weights; exchanged as one, so that
        an interrupt finds both or neither."""
        self.weights = [TrainedWeight(name, each, settings.seed) for name, each in parameters]
        self._by_id = {id(each.ref()): each for each in self.weights}

    @property
    def num_steps(self) -> int:
        """Steps that are over: the number of the step that runs."""
        return self._steps[0]

    def of(self, parameter: object) -> TrainedWeight | None:
        """Return what is known of *parameter*; None if it is not trained."""
        weight = self._by_id.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def end_step(self, past: PastStep | None) -> None:
        """Note the step that is over; None: nothing changes by it.

        No weight may be behind the one before, unless *past* is None.
        """
        number, last = self._steps
        self._steps = number + 1, past or last

    def start_at(self, num_steps: int) -> None:
        """Go on from step *num_steps*; no weight may be behind."""
        self._steps = num_steps, None
        for weight in self.weights:
            weight.num_applied = num_steps

    def is_behind(self, weight: TrainedWeight) -> bool:
        """Say whether *weight* is still to be updated."""
        _, last = self._steps
        return last is not None and weight.num_applied <= last.step

    def draw(
        self, key: NoiseKey, step: int, first: int, end: int, device: torch.device
    ) -> torch.Tensor:
        """Return the noise of elements *first* to *end* in *step*, a new float32 tensor."""
        z = noise(key, step, first, end, device)
        return z if self.settings.transfer_dtype is None else int8_transfer.rounded_noise(z)

    def update(
        self,
        weight: TrainedWeight,
        data: torch.Tensor,
        state: torch.Tensor | None,
        draw: Draw | None = None,
    ) -> None:
        """Update *data*, the bits of *weight*, and *state*, its momentum, by the last step.

        The weight is still behind, until :meth:`note_updated` is called. *draw* gives the noise;
        None: :meth:`draw`.
        """
        _, last = self._steps
        assert last is not None
        momentum = self.settings.momentum
        update(data, weight.key, last, momentum=momentum, state=state, draw=draw or self.draw)

    def perturbed(self, weight: TrainedWeight, data: torch.Tensor, sign: int) -> torch.Tensor:
        """Return *data*, bits of *weight* on the device, perturbed for the pass of *sign*."""
        scale = sign * self.settings.epsilon
        return perturbed(data, weight.key, self.num_steps, scale, draw=self.draw)

    def note_updated(self, weight: TrainedWeight) -> None:
        """Note that *weight* is not behind any more."""
        weight.num_applied = self.num_steps

    def give_state(self, weight: TrainedWeight, state: torch.Tensor | None) -> None:
        """Let the momentum of *weight* be *state*."""
        weight.state = state


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
        self.noise_step: int | None = None
        """The step whose noise is on the host, or on its way there; None: there is none."""
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
            self.nbytes = self._packed_nbytes * (1 + bool(self.trained))
            self.host_nbytes += self.nbytes
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
            self._all_trained.give_state(known, self.state(weight))

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what an upload copies: first byte in the slot, and uint8 bytes on the host."""
        if self.is_packed:
            yield 0, self._host[self._packed_from :][: self._packed_nbytes]
        else:
            yield 0, self._host

    def pieces_back(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what goes back: first byte in the slot, and bytes on the host."""
        if self.is_packed:
            yield self._packed_nbytes, self._host[self._packed_from + self._packed_nbytes :]
        elif len(self.trained) == len(self.weights):
            yield 0, self._host
        else:
            for weight, _ in self.trained:
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
        """Write the weights to what crosses the link: those that are trained, or all."""
        for weight in self.weights if also_frozen else [each for each, _ in self.trained]:
            if (parameter := weight.ref()) is not None:
                memory = self._host[self._packed_from + self._packed[weight] :]
                int8_transfer.pack(parameter.detach(), memory)

    def draw_noise(self, slot: DeviceBlock) -> None:
        """Draw the noise of the step that runs into *slot*; call :meth:`note_noise` behind that."""
        self.noise_step = None
        step, memory = self._all_trained.num_steps, _bytes_of(slot)
        for weight, known in self.trained:
            codes = memory[self._packed_nbytes + self._packed[weight] :]
            for first, end in chunks(known.num_elements):
                z = self._all_trained.draw(known.key, step, first, end, slot.device)
                int8_transfer.pack_noise(z, codes[first:end])

    def note_noise(self) -> None:
        """Note that the noise of the step that runs is on its way to the host."""
        self.noise_step = self._all_trained.num_steps

    def drawn(self, weight: Weight) -> Draw:
        """Return what gives the noise of a trained weight as it has come to the host.

        That of another step is drawn: it has the same bits.
        """
        codes = self._host[self._packed_from + self._packed_nbytes + self._packed[weight] :]

        def draw(
            key: NoiseKey, step: int, first: int, end: int, device: torch.device
        ) -> torch.Tensor:
            if step != self.noise_step:
                return self._all_trained.draw(key, step, first, end, device)
            return int8_transfer.unpack_noise(codes[first:end])

        return draw


def _bytes_of(slot: DeviceBlock) -> torch.Tensor:
    return bytes_view(slot.storage, slot.device, 0, slot.storage.nbytes())
