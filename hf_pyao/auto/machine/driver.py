"""Performs what the machine decides: the only caller of ``engine.use``.

It exchanges policies, windows and options of the step. A performer does the rest (measuring,
planning, telling); its answers are the machine's next events.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.states import Options, Ready, State, Target
from hf_pyao.auto.machine.table import next_state
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.policy import Policy
from hf_pyao.levers import Levers
from hf_pyao.text import echo

logger = logging.getLogger(__name__)

Perform: TypeAlias = Callable[[do.Action, State], on.Event | None]
"""Performs an action; returns the event that answers it, if there is one."""

MOST_TRANSITIONS = 200
"""Newest transitions that are kept for the run's report."""

_RESUMED = (
    *(do.Use, do.Measure, do.CancelMeasuring, do.TimeMicroBatches, do.StopTiming),
    *(do.ForgetForward, do.StreamAll),
)
"""Actions that an interrupt only delays: they are performed before the next event."""


class Residency(Protocol):
    """Says how many layers' frozen weights stay on the device, where a plan may say it."""

    def ask_for(self, num_resident: int) -> None:
        """Let so many stay from the next forward on."""
        ...

    def ask_for_unplanned(self) -> None:
        """Let as many stay as before there was a plan."""
        ...

    def stream_all(self) -> None:
        """Let none stay."""
        ...


def _nothing_to_release() -> None:
    """Nothing is cached."""


@dataclass(frozen=True)
class Policies:
    """The policy for each target. None of them may hold the model."""

    configured: Policy
    nothing: Policy
    everything: Policy
    recomputed: Policy
    of_plan: Callable[[Ready], Policy]
    window_of_plan: Callable[[Ready], int | None] = lambda ready: None
    """Bytes; None: the window stays."""
    residents_of_plan: Callable[[Ready], int | None] = lambda ready: None
    """Layers whose frozen weights stay; None: the plan does not say."""
    configured_window_bytes: Callable[[], int | None] = lambda: None
    """The configured window, in bytes; None: the window stays. It is a function because other
    models may come to share the window after ``attach``."""
    before_plan: Callable[[], None] = _nothing_to_release
    """Called before a plan is used: it may give back cached memory."""

    def of(self, use: do.Use) -> Policy:
        """Return the policy that is to be used."""
        if use.target is Target.PLAN:
            assert use.ready is not None, "the machine uses no plan without one"
            return self.of_plan(use.ready)
        return {
            Target.CONFIGURED: self.configured,
            Target.NOTHING: self.nothing,
            Target.EVERYTHING: self.everything,
            Target.RECOMPUTED: self.recomputed,
            Target.WAITING: self.everything,
        }[use.target]


class Driver:
    """Tells the machine of events, and performs its actions on one engine.

    Args:
        engine: held weakly.
        policies: for each target.
        switch: sets the options of the step.
        state: to begin with.
        residency: sets how many layers' frozen weights stay; None: plans do not say that.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        policies: Policies,
        switch: LeverSwitch,
        state: State,
        residency: Residency | None = None,
    ) -> None:
        self._residency = residency
        self._engine = weakref.ref(engine)
        self._policies = policies
        self._switch = switch
        self._perform_other: Callable[[], Perform | None] = lambda: None
        self.state = state
        """What is known now; replaced by :meth:`send` alone."""
        self._events: deque[on.Event] = deque()
        self._left: tuple[do.Action, ...] = ()
        """Actions of the newest transition that are not performed yet."""
        self._is_sending = False
        self._answer: str | None = None
        self._transitions: deque[dict[str, Any]] = deque(maxlen=MOST_TRANSITIONS)

    def perform_with(self, perform: Perform) -> None:
        """Let a method perform the actions that exchange no policy. Its object is held weakly."""
        self._perform_other = weakref.WeakMethod(perform)

    def send(self, event: on.Event) -> str | None:
        """Tell the machine of *event*, and perform what it decides.

        Returns:
            What is done from now on, where the event asks for more memory; None: nothing, or it
            asks for none.

        Raises:
            Exception: what performing an action raised. The state is that after the event.
        """
        self._events.append(event)
        if self._is_sending:  # it comes from a performer, and waits for its turn
            return None
        self._is_sending, self._answer = True, None
        try:
            left, self._left = self._left, ()
            self._perform_all(tuple(each for each in left if isinstance(each, _RESUMED)))
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._events.clear()
            self._is_sending = False
        return self._answer

    def transitions(self) -> list[dict[str, Any]]:
        """Return the newest transitions between modes, as plain values for a report."""
        return list(self._transitions)

    def _step(self, event: on.Event) -> None:
        before = self.state
        state, actions = next_state(before, event)
        self._left = actions
        self.state = state
        if state.mode is not before.mode:
            self._note(event, before, state)
        self._perform_all(actions)

    def _note(self, event: on.Event, before: State, state: State) -> None:
        engine = self._engine()
        self._transitions.append(
            {
                "forward": 0 if engine is None else engine.num_forwards,
                "event": type(event).__name__,
                "from": before.mode.name,
                "to": state.mode.name,
            }
        )
        if logger.isEnabledFor(logging.DEBUG):
            modes = f"{before.mode.name} -> {state.mode.name}"
            logger.debug("%s: %s, %s", type(event).__name__, modes, echo(event))

    def _perform_all(self, actions: tuple[do.Action, ...]) -> None:
        for number, action in enumerate(actions):
            self._left = actions[number:]
            try:
                answer = self._perform(action)
            except Exception:
                self._left = ()  # an error would come again
                raise
            if answer is not None:
                self._events.append(answer)
        self._left = ()

    def _perform(self, action: do.Action) -> on.Event | None:
        if isinstance(action, do.Use):
            self._use(action)
            return None
        if isinstance(action, do.Answer):
            self._answer = action.words
            return None
        if isinstance(action, do.StreamAll):
            if self._residency is not None:
                self._residency.stream_all()
            return None
        perform = self._perform_other()
        return None if perform is None else perform(action, self.state)

    def _use(self, use: do.Use) -> None:
        engine = self._engine()
        if engine is None:
            return
        self._set_options(use)
        self._set_residents(use)
        if use.target is Target.PLAN:
            self._policies.before_plan()
        window_bytes = None
        if use.resets_window:
            window_bytes = self._policies.configured_window_bytes()
        elif use.ready is not None:
            window_bytes = self._policies.window_of_plan(use.ready)
        if window_bytes is not None:
            engine.link.set_window(window_bytes)
        engine.use(self._policies.of(use))
        if use.target is Target.WAITING:
            engine.link.set_limit(0)

    def _set_residents(self, use: do.Use) -> None:
        residency = self._residency
        if residency is None or use.target is Target.NOTHING:
            return
        if use.target is Target.CONFIGURED:
            residency.ask_for_unplanned()
        elif use.target is not Target.PLAN:
            residency.stream_all()
        elif use.ready is not None:
            number = self._policies.residents_of_plan(use.ready)
            if number is not None:
                residency.ask_for(number)

    def _set_options(self, use: do.Use) -> None:
        switch = self._switch
        if use.options is Options.CONFIGURED:
            switch.set(switch.configured)
        elif use.options is Options.ONCE:
            switch.set(Levers(head_loss=switch.levers.head_loss))
        elif use.options is Options.PLAN and use.ready is not None:
            if use.ready.options is not None:
                switch.set(use.ready.options)
