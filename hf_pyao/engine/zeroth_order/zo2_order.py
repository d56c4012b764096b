"""Noise as ZO2 draws it: from a generator, in the order in which modules are visited.

Source: ZO2 (arXiv 2503.12668), section 5 and algorithm 3. Each step seeds a generator with
a number from numpy's. Modules draw one after the other as the forward comes to them: embeddings,
layers, norm, head, and each draws for its parameters in the order of ``named_parameters``, in the
parameter's dtype. The update is made at the next visit, from the same state of the generator. So a
tied head is perturbed and updated twice, with two noises, and its embedding reads it before the
second of both updates.

Two things are not ZO2's. A weight is perturbed from a pristine copy, so that it keeps its bits.
And the generator is one of its own: dropout draws from torch's, as without ZO2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from hf_pyao.engine.zeroth_order.perturbation import Draw, PastStep, ZerothOrderSettings
from hf_pyao.engine.zeroth_order.trained import TrainedPart, TrainedWeight, TrainedWeights

_MOST_SEED = 1_000_000_000


class VisitedPart(TrainedPart):
    """A parameter as one module has it.

    Args:
        weight: the parameter.
        module: name of the module, or of the layer around it.
        num_applied: how many steps it has been updated by.
    """

    __slots__ = ("module", "weight")

    def __init__(self, weight: TrainedWeight, module: str, num_applied: int) -> None:
        super().__init__(weight.key, 0, weight.num_elements, num_applied)
        self.weight = weight
        self.module = module


class WeightsInVisitingOrder(TrainedWeights):
    """Trained weights whose noise is drawn as modules are visited.

    Args:
        parameters: name and parameter; each parameter once.
        modules: by name of a module, the parameters that it has, in its order. A layer is one.
        settings: scale and seed.
        device: where noise is drawn.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        modules: Mapping[str, Sequence[torch.Tensor]],
        settings: ZerothOrderSettings,
        device: torch.device,
    ) -> None:
        super().__init__(parameters, settings)
        self._generator = torch.Generator(device)
        self._seeds = np.random.RandomState(settings.seed % 2**32)
        self._drawn_seeds: list[int] = []
        self._modules: dict[str, list[VisitedPart]] = {}
        parts: dict[TrainedWeight, list[TrainedPart]] = {weight: [] for weight in self.weights}
        for module, own in modules.items():
            places = self._modules[module] = []
            for parameter in own:
                if (known := self.of(parameter)) is not None:
                    places.append(VisitedPart(known, module, 0))
                    parts[known].append(places[-1])
        for weight, found in parts.items():
            weight.take_parts(found)
        self._states: dict[int, dict[TrainedPart, torch.Tensor]] = {}
        """By step, the generator's state before each draw, in the order of the visits."""
        self._next: dict[int, torch.Tensor] = {}
        """By step, its state for the next module."""

    def visit(self, module: str) -> None:
        """Draw for *module* if the step that runs has not yet, behind the modules before it."""
        step = self.num_steps
        states = self._states.setdefault(step, {})
        places = self._modules.get(module, [])
        if not places or places[0] in states:
            return
        if step not in self._next:
            self._generator.manual_seed(self._seed_of(step))
            self._next[step] = self._generator.get_state()
        self._generator.set_state(self._next[step])
        found: dict[TrainedPart, torch.Tensor] = {}
        for place in places:
            found[place] = self._generator.get_state()
            parameter = place.weight.ref()
            assert parameter is not None
            self._draw(parameter)
        self._next[step] = self._generator.get_state()
        states.update(found)

    def parts_at(self, weight: TrainedWeight, module: str) -> list[TrainedPart]:
        """Return what of *weight* is updated as *module* reads it; all of it for no module."""
        parts: list[TrainedPart] = list(weight.parts)
        return parts if not module else [p for p in parts if p.module == module]  # type: ignore[attr-defined]

    def perturbed(
        self,
        weight: TrainedWeight,
        data: torch.Tensor,
        sign: int,
        first: int = 0,
        module: str = "",
        draw: Draw | None = None,
    ) -> torch.Tensor:
        """Return *data*, the bits of *weight*, perturbed as *module* reads it in this step."""
        (part,) = self.parts_at(weight, module)
        self._generator.set_state(self._states[self.num_steps][part])
        z = self._draw(data)
        return data + sign * z * self.settings.epsilon

    def catch_up(
        self,
        part: TrainedPart,
        data: torch.Tensor,
        state: torch.Tensor | None,
        draw: Draw | None = None,
    ) -> Callable[[], None] | None:
        """Update *data* by the steps in which this module has read it; see the base class."""
        first, kept = self._past
        steps = [past for past in kept[part.num_applied - first :] if past is not None]
        num_steps, has_changed = self.num_steps, False
        for past in steps:
            before = self._states.get(past.step, {}).get(part)
            if before is not None:  # else the module was left out in that step
                self._generator.set_state(before)
                data.sub_(past.learning_rate * (past.gradient * self._draw(data)))
                has_changed = True

        def note() -> None:
            part.note_applied(num_steps)

        if not has_changed:
            note()
            return None
        return note

    def end_step(self, past: PastStep | None) -> None:
        """Note the step that is over, and forget states that no update needs any more."""
        super().end_step(past)
        first = self._past[0]
        for states in (self._states, self._next):
            for step in [each for each in states if each < first]:
                del states[step]

    def start_at(self, num_steps: int) -> None:
        """Go on from step *num_steps*."""
        super().start_at(num_steps)
        self._states.clear()
        self._next.clear()

    def _seed_of(self, step: int) -> int:
        while len(self._drawn_seeds) <= step:
            self._drawn_seeds.append(int(self._seeds.randint(_MOST_SEED)))
        return self._drawn_seeds[step]

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.normal(
            mean=0.0,
            std=1.0,
            size=tuple(like.shape),
            generator=self._generator,
            dtype=like.dtype,
            device=self._generator.device,
        )
