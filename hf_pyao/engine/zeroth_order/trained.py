"""The trained weights of one model, and the step that each of them is still to be updated by."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.noise import NoiseKey, noise
from hf_pyao.engine.zeroth_order.perturbation import (
    Draw,
    PastStep,
    ZerothOrderSettings,
    perturbed,
    update,
)


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

    def give_state(self, state: torch.Tensor | None) -> None:
        """Let the momentum be *state*."""
        self.state = state


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
        """Update *data*, the bits of *weight* on any device, by the last step.

        The weight is still behind, until :meth:`note_updated` is called.

        Args:
            weight: what *data* is of.
            data: changed in place.
            state: the momentum beside it, float32, changed in place; None without momentum.
            draw: gives the noise; None: :meth:`draw`.
        """
        _, last = self._steps
        assert last is not None
        momentum = self.settings.momentum
        update(data, weight.key, last, momentum=momentum, state=state, draw=draw or self.draw)

    def note_updated(self, weight: TrainedWeight) -> None:
        """Note that *weight* is not behind any more."""
        weight.num_applied = self.num_steps

    def perturbed(
        self, weight: TrainedWeight, data: torch.Tensor, sign: int, draw: Draw | None = None
    ) -> torch.Tensor:
        """Return *data*, bits of *weight* on the device, perturbed for the pass of *sign*."""
        scale = sign * self.settings.epsilon
        return perturbed(data, weight.key, self.num_steps, scale, draw=draw or self.draw)
