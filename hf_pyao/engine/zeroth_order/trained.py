"""The trained weights of one model, and the steps that each of them is still to be updated by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hf_pyao.engine.zeroth_order import int8_transfer
from hf_pyao.engine.zeroth_order.noise import NoiseKey, noise, noise_of_rows
from hf_pyao.engine.zeroth_order.perturbation import (
    CHUNK_ELEMENTS,
    Draw,
    PastStep,
    ZerothOrderSettings,
    perturbed,
    perturbed_rows,
    update,
    update_rows,
)


class TrainedPart:
    """Elements of one parameter that are updated together: all of them, or some rows.

    Args:
        key: of the parameter's noise.
        first: the first element, in the order of a contiguous tensor.
        num_elements: how many there are.
        num_applied: how many steps they have been updated by.
    """

    __slots__ = ("first", "key", "num_applied", "num_elements", "state")

    def __init__(self, key: NoiseKey, first: int, num_elements: int, num_applied: int) -> None:
        self.key = key
        self.first = first
        self.num_elements = num_elements
        self.num_applied = num_applied
        self.state: torch.Tensor | None = None
        """The momentum, float32, shape (num_elements,), where the weight lives; None without
        momentum, and before it is given memory."""

    def give_state(self, state: torch.Tensor) -> None:
        """Let the momentum be *state*, as the attribute."""
        self.state = state


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
        self.parts = [TrainedPart(self.key, 0, self.num_elements, num_applied)]

    def divide(self, firsts: Sequence[int]) -> None:
        """Update the elements from each of *firsts* up to the next one by themselves."""
        ends = [*firsts[1:], self.num_elements]
        num_applied = self.parts[0].num_applied
        self.parts = [
            TrainedPart(self.key, first, end - first, num_applied)
            for first, end in zip(firsts, ends, strict=True)
        ]

    def part_from(self, first: int) -> TrainedPart:
        """Return the part that begins with element *first*."""
        return next(part for part in self.parts if part.first == first)


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
        self.is_packed = settings.transfer_dtype is not None
        """Whether weights and noise cross the link in int8."""
        self._past: tuple[int, tuple[PastStep | None, ...]] = (num_steps, ())
        """Number of the oldest step that is kept, and the steps from there on; exchanged as one,
        so that an interrupt finds both or neither."""
        self.weights = [
            TrainedWeight(name, each, settings.seed, num_steps) for name, each in parameters
        ]
        self._by_id = {id(each.ref()): each for each in self.weights}

    @property
    def num_steps(self) -> int:
        """Steps that are over: the number of the step that runs."""
        first, kept = self._past
        return first + len(kept)

    @property
    def num_kept(self) -> int:
        """Steps that are over and kept: some weight is still to be updated by the oldest."""
        return len(self._past[1])

    @property
    def parts(self) -> Iterator[TrainedPart]:
        """The parts of all weights."""
        for weight in self.weights:
            yield from weight.parts

    def of(self, parameter: object) -> TrainedWeight | None:
        """Return what is known of *parameter*; None if it is not trained."""
        weight = self._by_id.get(id(parameter))
        return weight if weight is not None and weight.ref() is parameter else None

    def end_step(self, past: PastStep | None) -> None:
        """Note the step that is over. None: nothing changes by it."""
        first, kept = self._past
        kept = (*kept, past)
        oldest = min((part.num_applied for part in self.parts), default=first + len(kept))
        if oldest > first:
            first, kept = oldest, kept[oldest - first :]
        self._past = first, kept

    def start_at(self, num_steps: int) -> None:
        """Go on from step *num_steps*; no step may be left to apply."""
        assert not any(map(self.is_behind, self.parts))
        self._past = num_steps, ()
        for part in self.parts:
            part.num_applied = num_steps

    def is_behind(self, part: TrainedPart, least: int = 1) -> bool:
        """Say whether *part* is still to be updated by *least* steps or more."""
        return len(self._steps_for(part)) >= least

    def _steps_for(self, part: TrainedPart) -> list[PastStep]:
        first, kept = self._past
        return [past for past in kept[part.num_applied - first :] if past is not None]

    def draw(
        self, key: NoiseKey, step: int, first: int, end: int, device: torch.device
    ) -> torch.Tensor:
        """Return the noise of elements *first* to *end* in *step*, a new float32 tensor."""
        z = noise(key, step, first, end, device)
        return int8_transfer.rounded_noise(z) if self.is_packed else z

    def _draw_rows(self, key: NoiseKey, step: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        z = torch.empty((rows.numel(), width), dtype=torch.float32, device=rows.device)
        most = max(1, CHUNK_ELEMENTS // width)
        for first in range(0, rows.numel(), most):
            z[first : first + most] = noise_of_rows(key, step, rows[first : first + most], width)
        return int8_transfer.rounded_noise(z) if self.is_packed else z

    def catch_up(
        self,
        part: TrainedPart,
        data: torch.Tensor,
        state: torch.Tensor | None,
        draw: Draw | None = None,
    ) -> Callable[[], None] | None:
        """Update *data*, the bits of *part* on any device, by the steps that it has not seen.

        Nothing else changes until the function is called that this returns: whoever fails before
        that puts *data* and *state* back, and calls this again later. It may be called twice.

        Args:
            part: what *data* is of.
            data: changed in place.
            state: the momentum beside it, float32, changed in place; None without momentum.
            draw: gives the noise; None: :meth:`draw`.

        Returns:
            What notes that the part was updated; None if *data* has not changed.
        """
        steps = self._steps_for(part)
        num_steps = self.num_steps
        if not steps:
            part.num_applied = num_steps
            return None
        momentum = self.settings.momentum
        assert bool(momentum) == (state is not None)
        for past in steps:
            update(
                data,
                part.key,
                past,
                momentum=momentum,
                state=state,
                first_element=part.first,
                draw=draw or self.draw,
            )

        def note() -> None:
            part.num_applied = num_steps

        return note

    def catch_up_rows(
        self,
        part: TrainedPart,
        rows: torch.Tensor,
        data: torch.Tensor,
        state: torch.Tensor | None,
    ) -> None:
        """Update *data*, a copy of some rows of *part*, by the steps that the part has not seen.

        Args:
            part: rows of a parameter; it stays as it is.
            rows: int64, shape (N,), the rows' numbers in the parameter, on the device of *data*.
            data: shape (N, D), changed in place.
            state: the momentum of these rows, shape (N, D), changed in place; None without it.
        """
        for past in self._steps_for(part):
            z = self._draw_rows(part.key, past.step, rows, data.shape[1])
            update_rows(data, z, past, momentum=self.settings.momentum, state=state)

    def perturbed(
        self,
        weight: TrainedWeight,
        data: torch.Tensor,
        sign: int,
        first: int = 0,
        draw: Draw | None = None,
    ) -> torch.Tensor:
        """Return *data*, bits of *weight*, perturbed for the pass of *sign* in this step.

        Args:
            weight: which one.
            data: on the device; it keeps its bits.
            sign: 1 or -1.
            first: the weight's element that *data* begins with.
            draw: gives the noise; None: :meth:`draw`.
        """
        scale = sign * self.settings.epsilon
        draw = draw or self.draw
        return perturbed(data, weight.key, self.num_steps, scale, first_element=first, draw=draw)

    def perturbed_rows(
        self, weight: TrainedWeight, rows: torch.Tensor, data: torch.Tensor, sign: int
    ) -> torch.Tensor:
        """Return *data*, some rows of *weight*, perturbed; *rows* are their numbers."""
        z = self._draw_rows(weight.key, self.num_steps, rows, data.shape[1])
        return perturbed_rows(data, z, sign * self.settings.epsilon)
