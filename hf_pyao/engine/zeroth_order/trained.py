"""The trained weights of one model, and the steps that each of them is still to be updated by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from hf_pyao.engine.zeroth_order.noise import NoiseKey
from hf_pyao.engine.zeroth_order.perturbation import (
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
        num_applied: how many steps it has been updated by.
    """

    def __init__(self, name: str, parameter: torch.Tensor, seed: int, num_applied: int) -> None:
        self.name = name
        self.ref = weakref.ref(parameter)
        self.key = NoiseKey.of(seed, name)
        self.num_elements = parameter.numel()
        self.num_applied = num_applied
        self.state: torch.Tensor | None = None
        """The momentum, float32, on the host; None without momentum, and before the first step."""

    def keep_state(self, state: torch.Tensor) -> None:
        """Keep a copy of *state*, the momentum, on the host."""
        if self.state is None:
            self.state = torch.empty(self.num_elements, dtype=torch.float32)
        self.state.copy_(state)


class TrainedWeights:
    """All trained weights of a model, and the past steps.

    A weight is updated when it is read next. So a step that is over is kept until every weight has
    been updated by it.

    Args:
        parameters: name and parameter; each parameter once.
        settings: scale, momentum and seed.
        num_steps: steps that were made before, by a run that is resumed.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        settings: ZerothOrderSettings,
        num_steps: int = 0,
    ) -> None:
        self.settings = settings
        self.num_steps = num_steps
        """Steps that are over: the number of the step that runs."""
        self._first_kept = num_steps
        self._past: list[PastStep | None] = []
        self.weights = [
            TrainedWeight(name, each, settings.seed, num_steps) for name, each in parameters
        ]
        self._by_id = {id(each.ref()): each for each in self.weights}

    def of(self, parameter: object) -> TrainedWeight | None:
        """Return what is known of *parameter*; None if it is not trained."""
        weight = self._by_id.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def end_step(self, past: PastStep | None) -> None:
        """Note the step that is over. None: nothing changes by it."""
        self._past.append(past)
        self.num_steps += 1
        oldest = min((each.num_applied for each in self.weights), default=self.num_steps)
        if oldest > self._first_kept:
            del self._past[: oldest - self._first_kept]
            self._first_kept = oldest

    def start_at(self, num_steps: int) -> None:
        """Go on from step *num_steps*; no step may be left to apply."""
        assert not any(map(self.is_behind, self.weights))
        self.num_steps = self._first_kept = num_steps
        self._past = []
        for each in self.weights:
            each.num_applied = num_steps

    def is_behind(self, weight: TrainedWeight) -> bool:
        """Say whether *weight* is still to be updated by a step."""
        return any(past is not None for past in self._steps_for(weight))

    def _steps_for(self, weight: TrainedWeight) -> Sequence[PastStep | None]:
        return self._past[weight.num_applied - self._first_kept :]

    def catch_up(self, weight: TrainedWeight, data: torch.Tensor) -> Callable[[], None] | None:
        """Update *data*, the bits of *weight* on any device, by the steps that it has not seen.

        Nothing else changes until the function is called that this returns: whoever fails before
        that puts *data* back, and calls this again later.

        Returns:
            What notes that the weight was updated; None if *data* has not changed.
        """
        steps = [past for past in self._steps_for(weight) if past is not None]
        num_steps = self.num_steps
        if not steps:
            weight.num_applied = num_steps
            return None
        momentum = self.settings.momentum
        state: torch.Tensor | None = None
        if momentum:
            state = torch.zeros(weight.num_elements, dtype=torch.float32, device=data.device)
            if weight.state is not None:
                state.copy_(weight.state)
        for past in steps:
            update(data, weight.key, past, momentum=momentum, state=state)

        def note() -> None:
            if state is not None:
                weight.keep_state(state)
            weight.num_applied = num_steps

        return note

    def perturbed(self, weight: TrainedWeight, data: torch.Tensor, sign: int) -> torch.Tensor:
        """Return *data*, the bits of *weight*, perturbed for the pass of *sign* in this step."""
        return perturbed(data, weight.key, self.num_steps, sign * self.settings.epsilon)
