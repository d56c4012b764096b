"""Plans for each set of parameters that are trained, where layers are frozen and thawed in a run.

What is saved follows what is trained, and so do times. Where that changes, everything is offloaded
again, the next micro-batches are measured, and a plan is made for them; where the same parameters
were trained before, their plan is followed again.

Where it changes from one micro-batch to the next, as with adapters that take turns, there would
never be a plan: what has not lasted is let pass, until it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from hf_pyao.documents.plan import Plan
from hf_pyao.integrations.auto_check import Comparison
from hf_pyao.integrations.auto_correction import Corrector
from hf_pyao.integrations.auto_planning import PlanMaker
from hf_pyao.integrations.auto_trained import TrainedParameters
from hf_pyao.integrations.model_copy import ForwardWatch

MOST_PHASES = 8
"""Sets of parameters for which plans are made in a run."""

MOST_ROUNDS = 2 * MOST_PHASES
"""How often measuring may begin anew: what changes all the time comes to no end."""


@dataclass
class Phase:
    """While the same parameters are trained."""

    maker: PlanMaker
    comparison: Comparison
    corrector: Corrector = field(default_factory=Corrector)
    plan: Plan | None = None
    """What is followed; None until there is a plan."""


class Phases:
    """Knows which parameters are trained, and what was planned for them.

    Args:
        new: makes a phase in which nothing is planned yet.
        patience: forwards over which the same parameters must be trained for it to have lasted.
    """

    def __init__(self, new: Callable[[], Phase], patience: int) -> None:
        self._new = new
        self._patience = patience
        self._num_forwards = 0
        """Since others are trained than before, or since measuring began."""
        self._trained: weakref.ref[TrainedParameters] | None = None
        self._known: dict[bytes, Phase] = {}
        self._first = b""
        self._flags = b""
        """Of the phase that runs."""
        self._num_rounds_left = MOST_ROUNDS
        self.now = new()
        """The phase that runs."""

    @property
    def has_begun(self) -> bool:
        """True once it is known which parameters are trained."""
        return self._trained is not None

    def begin(self, model: nn.Module, watch: ForwardWatch) -> None:
        """Look at the parameters of *model*, as long as *watch* watches it."""
        trained = TrainedParameters(model)
        watch.hold(trained)
        self._trained = weakref.ref(trained)
        self._first = self._flags = trained.flags
        self._num_forwards = 1
        self._known[trained.flags] = self.now
        self.now.maker.trained = trained.mark

    def planned(self) -> None:
        """Take note that a plan is made, for what is trained in the forward that begins.

        That may be other than in the last one: the step is recorded as the model is now.
        """
        trained = None if self._trained is None else self._trained()
        if trained is None:
            return
        trained.look_again()
        if self._known.get(self._flags) is self.now:
            del self._known[self._flags]
            if self._first == self._flags:
                self._first = trained.flags
        self._flags = trained.flags
        self._known[trained.flags] = self.now
        self.now.maker.trained = trained.mark

    @property
    def is_first(self) -> bool:
        """True while the parameters are trained that were when the run began."""
        return self._known.get(self._first, self.now) is self.now

    def is_over(self) -> bool:
        """Say whether other parameters are trained than in this phase; before each forward.

        At once if this phase has lasted, and else when the others have. A quick look: see
        :class:`TrainedParameters`.
        """
        trained = None if self._trained is None else self._trained()
        if trained is None:
            return False
        has_lasted = self._num_forwards >= self._patience
        self._num_forwards += 1
        if trained.have_changed():
            trained.look_again()
            self._num_forwards = 1
            return has_lasted and trained.flags != self._flags
        return self._num_forwards == self._patience and trained.flags != self._flags

    def are_of(self, plan: Plan) -> bool:
        """Say whether *plan* is for the parameters that are trained, as far as it tells."""
        trained = self.now.maker.trained
        return None in (trained, plan.facts.trained) or plan.facts.trained == trained

    def go_over(self) -> None:
        """Go over to the phase of what is trained now."""
        trained = None if self._trained is None else self._trained()
        if trained is None:
            return
        self._flags = trained.flags
        self._num_forwards = 1
        known = self._known.get(trained.flags)
        self.now = self._new() if known is None else known
        self.now.maker.trained = trained.mark
        if len(self._known) < MOST_PHASES:
            self._known.setdefault(trained.flags, self.now)

    def may_measure(self) -> bool:
        """Say whether a plan may be made for this phase, and count it."""
        is_known = any(each is self.now for each in self._known.values())
        if not is_known or not self._num_rounds_left:
            return False
        self._num_rounds_left -= 1
        return True
