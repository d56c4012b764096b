"""Performs what the machine asks for under policy ``auto``: timing, planning, judging, telling."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_pyao.auto.machine import actions as do
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.states import Mode, Question, SetState, Source, State
from hf_pyao.auto.measuring import Measuring, num_bare
from hf_pyao.auto.plans.batch_fit import LARGER, ready_of
from hf_pyao.auto.plans.correction import CHECKPOINTING, LEAST_TIMED, beside, find_off
from hf_pyao.auto.plans.draft import Draft
from hf_pyao.auto.plans.kept_plans import PlanFiles
from hf_pyao.auto.plans.plan_timing import (
    LOSES,
    NUM_UNCOUNTED,
    PlanCheck,
    TimedMicroBatch,
    loses,
    typical,
)
from hf_pyao.auto.plans.planning import PlanMaker
from hf_pyao.auto.plans.settings import AutoSettings
from hf_pyao.auto.plans.trained import mark_of
from hf_pyao.auto.ranks.agreement import Agreement
from hf_pyao.auto.recording.lever_recording import LeverRecorder
from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.auto.view import ModelView
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import warn
from hf_pyao.metrics import format_bytes
from hf_pyao.plan.documents.plan import KEEP
from hf_pyao.plan.hardware.device_limit import gradient_bytes
from hf_pyao.plan.measure.segment_memory import SegmentMemory, largest
from hf_pyao.plan.solve.correction import ExpectedTimes
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)


class AutoActions:
    """The performer of policy ``auto``.

    Args:
        engine: what is timed; held weakly.
        device: where the model is.
        settings: what policy ``auto`` takes from the configuration.
        maker: makes plans.
        files: where the plan is kept.
        view: what is seen of the model.
        agreement: on plans, with other processes.
        measurer: measures micro-batches.
        num_sampled: as :class:`PlanCheck` takes it.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        device: torch.device,
        settings: AutoSettings,
        maker: PlanMaker,
        files: PlanFiles,
        view: ModelView,
        agreement: Agreement,
        measurer: Measuring,
        num_sampled: Callable[[], int],
    ) -> None:
        self._num_sampled = num_sampled
        self._engine = weakref.ref(engine)
        self._device = device
        self._settings = settings
        self._maker = maker
        self._files = files
        self._view = view
        self._agreement = agreement
        self._measurer = measurer
        self._check: PlanCheck | None = None
        self._memory = SegmentMemory(device)
        """What the plan that was checked last took on the device."""
        self._recorded_key: bytes | None = None
        """Which parameters were trained when the step of the newest profile was recorded."""
        self.say: Callable[[str], None] = lambda line: logger.info("%s", line)
        """Shows a line to the user."""

    def show_on(self, say: Callable[[str], None]) -> None:
        """Show what is decided by *say*; it is logged otherwise."""
        self.say = say

    def note_recorded(self) -> None:
        """Note that the newest profile's step was recorded now."""
        self._recorded_key = self._view.key_now()

    def perform(self, action: do.Action, state: State) -> on.Event | None:
        """Perform *action*; return the event that answers it, if there is one."""
        if isinstance(action, do.MakePlan):
            answer = self._make_plan(state)
            is_urgent = self._needs_at_once(state.now.question)
            return answer if is_urgent else self._agreement.if_all_follow(answer)
        if isinstance(action, do.Judge):
            return self._agreement.if_all_follow(self._judge(state.now))
        if isinstance(action, do.TimeMicroBatches):
            self._time(is_of_plan=action.is_of_plan)
        elif isinstance(action, do.StopTiming):
            self._stop_timing()
        elif isinstance(action, do.Measure):
            self._measurer.measure_anew()
        elif isinstance(action, do.CancelMeasuring):
            self._measurer.cancel()
        elif isinstance(action, do.ForgetForward):
            self._view.forget_forward()
        elif isinstance(action, do.Tell):
            self._agreement.tell(action.ready)
        elif isinstance(action, do.Keep):
            self._files.keep(action.ready.plan)
        elif isinstance(action, do.Say):
            self._show(action)
        return None

    # ---- other processes -----------------------------------------------------------------------

    def _needs_at_once(self, question: Question) -> bool:
        """Say whether this process's next micro-batch needs the plan.

        Without it, that would not fit, or its result would be wrong. Other plans are followed by
        all processes together, two micro-batches later.
        """
        is_for_others = bool(question.num_elements) and self._view.others_have_largest
        return question != Question() and not is_for_others

    # ---- timing --------------------------------------------------------------------------------

    def note_size(self, num_elements: int) -> None:
        """Note the batch that is about to run, for what is timed."""
        if self._check is not None:
            self._check.note_size(num_elements)

    def timed(self, state: State) -> on.Timed | None:
        """Return what was timed, once there is enough of it."""
        check = self._check
        if check is None or not check.is_done:
            return None
        self._stop_timing()
        draft = state.now.draft
        is_of_plan = state.mode is Mode.CHECKING and isinstance(draft, Draft)
        self._memory = check.memory
        return on.Timed(check.result(), draft.expected() if is_of_plan else None)

    def _time(self, *, is_of_plan: bool) -> None:
        self._stop_timing()
        engine = self._engine()
        if engine is None:
            return
        number = num_bare(self._settings.profile_steps)
        if is_of_plan:
            number = NUM_UNCOUNTED + max(LEAST_TIMED, self._settings.profile_steps)
        check = PlanCheck(
            engine,
            self._device,
            number,
            self._num_sampled,
            weakly(self._gradient_bytes, 0),
        )
        self._check = check
        check.start()

    def _gradient_bytes(self) -> int:
        return gradient_bytes(self._view.parameters())

    def _stop_timing(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.stop()

    # ---- planning ------------------------------------------------------------------------------

    def _make_plan(self, state: State) -> on.Event:
        try:
            found = self._planned(state)
        except Exception as error:  # no reason to end a training
            if state.now.question.less_memory:
                warn(
                    logger,
                    "no-tighter-plan",
                    "no tighter plan was found: %s",
                    describe_error(error),
                )
            return on.NotPlanned(describe_error(error))
        return found

    def _planned(self, state: State) -> on.Event:
        now, question = state.now, state.now.question
        if question == Question():
            return self._plan_first(state)
        draft: Draft = now.draft
        if number := question.num_elements:
            steps = self._view.steps(is_newest=True)
            larger = self._larger(draft, number, steps, now.cap_bytes)
            how = f"for batches of {number} elements instead of {draft.num_elements}"
            return self._answer(larger, f"{how}; {larger.limits.how}")
        if question.is_withdrawn:
            once = draft.in_room(self._view.room())
            return self._answer(once, "of layers that run once")
        tighter = draft.tighter()
        if tighter is None:
            return on.NotPlanned("there is no tighter plan", is_error=False)
        return self._answer(
            tighter, "after the device ran out of memory", cap_bytes=tighter.limits.limit_bytes
        )

    def _answer(self, draft: Draft, how: str, **more: Any) -> on.Planned:
        ready = ready_of(draft.plan, self._settings.given, keeps_all=draft.keeps_all)
        return on.Planned(ready, draft, how, **more)

    def _plan_first(self, state: State) -> on.Event:
        """Plan for the largest batch so far: with dynamic padding the first is one of many."""
        view, profile, cap_bytes = self._view, state.now.profile, state.now.cap_bytes
        if profile is None or profile.program is None:
            return self._plan_unrecorded(state)
        key = view.key_now()
        if key != self._recorded_key:  # others are trained since the step was recorded
            recorded = self._recorded(view.steps())
            profile = dataclasses.replace(profile, program=recorded.to_dict())
        # Training engines gather ahead once they have seen a micro-batch.
        grown_bytes = largest((profile.grown_bytes, self._memory.grown_bytes))
        profile = dataclasses.replace(profile, grown_bytes=grown_bytes)
        draft = self._maker.plan(
            profile,
            view.num_elements,
            view.recorder(),
            view.room(),
            cap_bytes=cap_bytes,
            trained=_mark(key),
        )
        if view.most_elements > LARGER * view.num_elements:
            steps = view.steps(is_largest=True)
            draft = self._larger(draft, view.most_elements, steps, cap_bytes)
        return self._answer(draft, draft.limits.how, key=key)

    def _plan_unrecorded(self, state: State) -> on.Event:
        """Keep what fits, without a recorded step."""
        profile = state.now.profile
        if profile is None:
            return on.NotPlanned("nothing was measured", is_error=False)
        trained = _mark(state.key)
        found = self._maker.plan_unrecorded(profile, self._view.most_elements, trained)
        if found is None:
            return on.NotPlanned(profile.why_no_program, is_error=False)
        plan, how = found
        keeps_all = plan.otherwise == KEEP
        ready = ready_of(plan, self._settings.given, keeps_all=keeps_all)
        return on.Planned(ready, None, how, source=Source.UNRECORDED)

    def _larger(
        self,
        draft: Draft,
        num_elements: int,
        steps: Callable[[], CopiedStep] | None,
        cap_bytes: float,
    ) -> Draft:
        """Record the step of a larger batch, take times in proportion, and plan for it."""
        recorded = self._recorded(steps)
        recorder = None if steps is None else LeverRecorder(steps, self._settings.layers)
        room = self._view.room()
        return self._maker.larger(
            draft, recorded, num_elements, recorder, room, cap_bytes=cap_bytes
        )

    def _recorded(self, steps: Callable[[], CopiedStep] | None) -> RecordedStep:
        if steps is None:
            raise CopyError("the model is not watched any more.")
        recorded, _ = record_fake_step(
            steps(), levers=self._settings.given.levers, layers=self._settings.layers
        )
        return recorded

    # ---- judging -------------------------------------------------------------------------------

    def _judge(self, now: SetState) -> on.Judged:
        """Compare what a plan came to with its prediction, and with what it replaced."""
        draft: Draft = now.draft
        times = now.times
        logger.info("policy 'auto': %s.", beside(times.plan, draft.expected()))
        # Of smaller batches than the plan is for there is no telling what its own would take.
        is_of_size = any(each.num_elements >= draft.num_elements for each in times.plan)
        draft, is_another = self._maker.remeasured(draft, self._memory if is_of_size else None)
        if is_another:
            more = format_bytes(self._maker.unpredicted_bytes)
            ready = ready_of(draft.plan, self._settings.given, keeps_all=draft.keeps_all)
            words = f"its step takes {more} more than predicted"
            return on.Judged(on.Corrected(ready, draft, words, frozenset(), is_another=True))
        if CHECKPOINTING in now.causes:  # which was tried whatever was predicted
            lost = self._lost(draft, times.plan, times.before, ())
            if lost is not None:
                return on.Judged(lost=lost)
        corrected = self._corrected(draft, times.plan, now.causes)
        if corrected is None or not corrected.is_another:
            checkpointed = self._checkpointed(draft, times.plan, now.causes)
            if checkpointed is not None:
                return on.Judged(checkpointed)
        if corrected is None:
            return on.Judged(lost=self._lost(draft, times.plan, times.before, times.fallback))
        if corrected.is_another:
            return on.Judged(corrected)
        fallback = () if corrected.is_speed else times.fallback
        return on.Judged(corrected, self._lost(corrected.draft, times.plan, times.before, fallback))

    def _checkpointed(
        self, draft: Draft, timed: Sequence[TimedMicroBatch], known: frozenset[str]
    ) -> on.Corrected | None:
        """Return checkpointing of as few layers as fit, where the plan takes longer than that.

        On a fast device Python decides how long a plan takes, and no prediction knows all of that.
        So it is tried, once, where the device alone would be faster with it, and timed in turn:
        what was measured counts.
        """
        other = None if CHECKPOINTING in known else draft.checkpointed()
        if other is None:
            return None
        measured_ms = typical(timed).layers_ms
        times = ExpectedTimes.of(other.chosen.step, other.chosen.timed)
        device_ms = times.layers_ms - times.host_ms
        if measured_ms <= LOSES * device_ms:
            return None
        words = (
            f"the plan before took {measured_ms:.1f} ms, and this should take {times.layers_ms:.1f}"
        )
        ready = ready_of(other.plan, self._settings.given)
        return on.Corrected(ready, other, words, frozenset({CHECKPOINTING}), is_another=True)

    def _corrected(
        self, draft: Draft, timed: Sequence[TimedMicroBatch], causes: frozenset[str]
    ) -> on.Corrected | None:
        most = LARGER * draft.num_elements  # the plan holds for larger batches, which take longer
        of_size = [each for each in timed if each.num_elements <= most]
        found = find_off(of_size, draft.num_elements, draft.expected, draft.copies_ms, causes)
        if found is None:
            return None
        after, is_another = draft.corrected(found.correction)
        return on.Corrected(
            ready_of(after.plan, self._settings.given, keeps_all=after.keeps_all),
            after,
            found.words,
            found.causes,
            is_another,
            is_speed=found.correction.compute != 1.0,
        )

    def _lost(
        self,
        draft: Draft,
        timed: Sequence[TimedMicroBatch],
        before: Sequence[TimedMicroBatch],
        fallback: Sequence[TimedMicroBatch],
    ) -> on.Lost | None:
        """Return what was faster: what was done before, or offloading everything; None: nothing."""
        for other, measured, name in (
            (draft.before, before, "the plan before"),
            (draft.fallback, fallback, "offloading everything"),
        ):
            lost = None if other is None else loses(timed, measured)
            if other is None or lost is None:
                continue
            after = draft.following(other)
            ready = ready_of(after.plan, self._settings.given, keeps_all=after.keeps_all)
            return on.Lost(ready, after, name, plan_ms=lost[0], fallback_ms=lost[1])
        return None

    # ---- telling -------------------------------------------------------------------------------

    def _show(self, action: do.Say) -> None:
        if action.key:
            warn(logger, action.key, "%s", action.line)
        else:
            self.say(action.line)


def _mark(key: bytes | None) -> int | None:
    return None if key is None else mark_of(key)
