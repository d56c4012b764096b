"""What policy ``auto`` sees of the model: batches, trained parameters, what may run again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

from torch import nn

from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.plans.trained import TrainedParameters
from hf_pyao.auto.recording.forward_watch import ForwardWatch
from hf_pyao.auto.recording.lever_recording import LeverRecorder, num_hooks_in, room_for
from hf_pyao.auto.recording.model_copy import CopiedStep
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.options.chosen_levers import FIXED, LeverRoom


class ModelView:
    """Looks at one model before its forwards; it does not hold it.

    Args:
        settings: what policy ``auto`` takes from the configuration.
        room: levers that may be chosen as far as the configuration goes.
        switch: knows why layers do not run again.
    """

    def __init__(self, settings: AutoSettings, room: LeverRoom, switch: LeverSwitch) -> None:
        self._settings = settings
        self._room_given = room
        self._switch = switch
        self._model: weakref.ref[nn.Module] | None = None
        self._trained: weakref.ref[TrainedParameters] | None = None
        self.watch: ForwardWatch | None = None
        """Tells of forwards; None before the start and after the end."""
        self.num_elements = 0
        """Of the batch whose step is recorded: the first one that is measured."""
        self.most_elements = 0
        """Of the largest batch since then, of any process."""
        self._others_largest: tuple[int, list[list[int]]] = (0, [])
        """Of the largest batch of another process: its elements, and the shapes of its tensors."""
        self._refused_elements = 0
        """Elements of such a batch whose plan was not followed."""
        self._looked_at: tuple[Plan, int, str] | None = None
        """The plan for which :meth:`why_not_again` was asked last, the number of hooks that the
        model had then, and why a layer did not run again."""

    def start(self, model: nn.Module, watch: ForwardWatch) -> None:
        """Look at *model* from now on."""
        self._model, self.watch = weakref.ref(model), watch

    def end(self) -> None:
        """Look no more. Twice is fine."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.remove()

    @property
    def model(self) -> nn.Module | None:
        """The model; None before the start, and once it is gone."""
        return None if self._model is None else self._model()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the model's parameters."""
        model = self.model
        return () if model is None else model.parameters()

    # ---- batches -------------------------------------------------------------------------------

    def note_batch(self, *, is_first: bool) -> int:
        """Note the batch of the forward that is about to run; return its elements."""
        num_elements = 0 if self.watch is None else self.watch.num_elements()
        if is_first:
            self.num_elements, self.most_elements = num_elements, 0
        self.most_elements = max(self.most_elements, num_elements, self._others_largest[0])
        return num_elements

    def newest_sizes(self) -> list[list[int]]:
        """Return the shapes of the tensors of the forward that is about to run."""
        return [] if self.watch is None else self.watch.newest_sizes()

    @property
    def others_elements(self) -> int:
        """Elements of the largest batch that another process told of; 0 if none did."""
        return self._others_largest[0]

    def forget_others_batch(self) -> None:
        """Look at no batch of another process that is not larger than those so far."""
        self._refused_elements = max(self._refused_elements, self.others_elements)
        self._others_largest = 0, []

    @property
    def others_have_largest(self) -> bool:
        """True if that is larger than the batch of the forward that is about to run."""
        own = 0 if self.watch is None else self.watch.num_elements()
        return self.others_elements > own

    def note_others_batch(self, num_elements: int, sizes: list[list[int]]) -> None:
        """Note a batch of another process."""
        known = max(self.others_elements, self._refused_elements)
        if num_elements > known and self._is_alike(sizes):
            self._others_largest = num_elements, sizes
            self.most_elements = max(self.most_elements, num_elements)

    def _is_alike(self, sizes: list[list[int]]) -> bool:
        """Say whether a forward of this process may have tensors of *sizes*."""
        seen = None if self.watch is None else self.watch.seen
        return seen is not None and seen.resized(sizes) is not None

    def forget_forward(self) -> None:
        """Take the next forward for the first one that is measured."""
        if self.watch is not None:
            self.watch.forget()

    def steps(
        self, *, is_newest: bool = False, is_largest: bool = False
    ) -> Callable[[], CopiedStep] | None:
        """Return what makes steps as in :meth:`ForwardWatch.steps`; None if nothing is watched.

        The newest or largest one is another process's, if that has more elements.
        """
        if self.watch is None:
            return None
        own = self.watch.num_elements() if is_newest else self.watch.most_elements
        if (is_newest or is_largest) and self.others_elements > own:
            return self.watch.steps(sizes=self._others_largest[1])
        return self.watch.steps(is_newest=is_newest, is_largest=is_largest)

    def recorder(self) -> LeverRecorder | None:
        """Return what records the measured step with other levers; None if it cannot be."""
        steps = self.steps()
        return None if steps is None else LeverRecorder(steps, self._settings.layers)

    # ---- trained parameters --------------------------------------------------------------------

    def trained_key(self) -> tuple[bytes, bool] | None:
        """Say which parameters are trained, and whether others are than a forward before.

        A quick look; see :class:`TrainedParameters`. None if there is no model.
        """
        trained = None if self._trained is None else self._trained()
        if trained is None:
            model = self.model
            if model is None or self.watch is None:
                return None
            trained = TrainedParameters(model)
            self.watch.hold(trained)
            self._trained = weakref.ref(trained)
            return trained.flags, False
        has_changed = trained.have_changed()
        if has_changed:
            trained.look_again()
        return trained.flags, has_changed

    def key_now(self) -> bytes | None:
        """Look at all parameters; return which are trained. None before the first forward."""
        trained = None if self._trained is None else self._trained()
        if trained is None:
            return None
        trained.look_again()
        return trained.flags

    # ---- layers that run again -----------------------------------------------------------------

    def room(self) -> LeverRoom:
        """Return which levers may be chosen."""
        model = self.model
        if model is None:
            return FIXED
        room, why = room_for(self._room_given, model, self._settings.layers), self._switch.refused
        if room.segments and why:
            return dataclasses.replace(room, segments=False, why_no_segments=why)
        return room

    def why_not_again(self, plan: Plan) -> str:
        """Say why layers may not run again as *plan* has it; empty if they may, or do not.

        The plan may be another process's or another run's, or the model has a new hook. What the
        user asked for is done all the same.
        """
        if not plan.levers.get("checkpoint_every"):
            return ""
        if "checkpoint_every" not in self._settings.given.free:
            return ""
        room = self.room()
        return "" if room.segments else f"layers would run again, and {room.why_no_segments}"

    def why_no_longer(self, plan: Plan) -> str:
        """Ask :meth:`why_not_again` where hooks or refusals are new since it was asked last."""
        model = self.model
        if model is None or not plan.levers.get("checkpoint_every"):
            return ""
        seen, before = (plan, num_hooks_in(model), self._switch.refused), self._looked_at
        if before is not None and before[0] is plan and before[1:] == seen[1:]:
            return ""
        self._looked_at = seen
        return self.why_not_again(plan)
