"""Chooses what changes the step itself, above :class:`Planner`, which plans a step as it is.

A *setting* of the levers (segments of how many layers, attention saved or not, how many tiles)
makes another step, which is recorded, and has a planner of its own. To record costs time: a setting
is looked at only where it may pay. The plan for the step as configured is looked at first. It is
left only for one that is faster by :data:`GAIN`, or where it does not fit.

What is skipped is skipped for one of these reasons, each a bound:

- What fits costs less than :data:`WORTH` over keeping everything, which nothing can beat.
- Layers that run again take one more forward, attention and each segment's end aside.
- Attention in groups gains no more than the memory that its kernels take.
- Longer segments take no less compute than those of one layer, and no less of the device where all
  their inputs leave: only what crosses the link, and the host, is less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from hf_pyao.engine.recompute.kept_attention import KERNELS
from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.plan.options.chosen_levers import FIXED, ChosenLevers, LeverRoom, LookedAt
from hf_pyao.plan.options.group_plan import TARGET_BYTES as GROUP_BYTES
from hf_pyao.plan.options.tile_plan import MIN_TILE_TOKENS
from hf_pyao.plan.solve.planner import OFFLOAD_ALL, Candidate, NoPlanFitsError, Planner
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.plan.step.step_program import FORWARD, OUTSIDE, StepProgram

WORTH = 1.02
"""Times keeping everything: a plan that takes no longer is not improved on."""

GAIN = 1.01
"""Another setting is chosen only if its plan is faster than that of the configured step by this
factor: the time that layers take to run again is an estimate."""

RUNS_AGAIN = 0.5
"""Least share of the layers' forward that running again takes: the products at the end of each are
not repeated, since nothing asks for what they return."""

PlannerWith = Callable[[Levers], Planner]
"""Records the step with other levers, and returns its planner; raises LeversRefusedError."""


class LeverChoice:
    """Plans a step with each setting of its levers that may pay, and keeps the planners.

    Args:
        levers: as configured.
        configured: the planner for the step with them.
        planner_with: makes the planner for the step with others.
        room: which may be chosen.
    """

    def __init__(
        self,
        levers: Levers,
        configured: Planner,
        planner_with: PlannerWith,
        room: LeverRoom = FIXED,
    ) -> None:
        self.levers = levers
        self.configured = configured
        self.room = room
        self._planner_with = planner_with
        self._planners: dict[Levers, Planner | str] = {levers: configured}

    def best(self, limit_bytes: float) -> ChosenLevers:
        """Return the fastest plan of any setting within *limit_bytes*, or what has the lowest peak.

        A plan for another setting than the configured one is faster than its by :data:`GAIN`.
        """
        return _Search(self, limit_bytes).run()

    def as_configured(self, candidate: Candidate) -> ChosenLevers:
        """Return *candidate*, a plan for the step as configured, as what was chosen."""
        return ChosenLevers(
            levers=self.levers,
            planner=self.configured,
            candidate=candidate,
            fits=True,
            configured=self.configured,
            looked_at=(),
            reason="",
        )

    def planner_for(self, levers: Levers) -> Planner:
        """Return the planner for a setting.

        Raises:
            LeversRefusedError: the step cannot be recorded with it.
        """
        known = self._planners.get(levers)
        if known is None:
            try:
                known = self._planner_with(levers)
            except LeversRefusedError as error:
                known = f"{error}"
            self._planners[levers] = known
        if isinstance(known, str):
            raise LeversRefusedError(known)
        return known

    def recorded(self, levers: Levers) -> Planner | None:
        """Return the planner for a setting if it was made already."""
        known = self._planners.get(levers)
        return None if isinstance(known, str) else known


class _Search:
    """One choice, within one limit."""

    def __init__(self, choice: LeverChoice, limit_bytes: float) -> None:
        self._choice = choice
        self._limit_bytes = limit_bytes
        self._given = choice.levers
        self._found: dict[Levers, LookedAt] = {}

    def run(self) -> ChosenLevers:
        """Look at what may pay, and choose."""
        configured = self._look(self._given)
        assert configured.planner is not None
        self._look_at_groups()
        if self._choice.room.segments:
            self._look_at_segments()
        if self._choice.room.tiles:
            self._look_at_tiles()
        self._look_at_groups()
        chosen = self._chosen()
        assert chosen.planner is not None
        assert chosen.candidate is not None
        return ChosenLevers(
            levers=chosen.levers,
            planner=chosen.planner,
            candidate=chosen.candidate,
            fits=chosen.fits,
            configured=configured.planner,
            looked_at=tuple(self._found.values()),
            reason=self._reason(configured, chosen),
            error="" if chosen.fits else chosen.note,
        )

    # ---- one setting ---------------------------------------------------------------------------

    def _look(self, levers: Levers) -> LookedAt:
        """Plan with *levers*, recording the step if need be."""
        try:
            planner = self._choice.planner_for(levers)
        except LeversRefusedError as error:
            self._found[levers] = LookedAt(levers=levers, note=f"{error}")
            return self._found[levers]
        note = ""
        try:
            candidate = planner.best(self._limit_bytes)
        except NoPlanFitsError as error:
            note, candidate = f"{error}", planner.least()
        found = LookedAt(
            levers=levers, planner=planner, candidate=candidate, fits=not note, note=note
        )
        self._found[levers] = found
        return found

    def _look_if_it_may_pay(self, levers: Levers) -> None:
        if levers in self._found:
            return
        note = self._why_not(levers)
        if note:
            self._found[levers] = LookedAt(levers=levers, note=note)
        else:
            self._look(levers)

    def _why_not(self, levers: Levers) -> str:
        """Say why a setting need not be looked at; empty if it may pay."""
        best = self._best_so_far()
        least_ms = self._least_ms(levers)
        if best is not None and best.step_ms <= GAIN * least_ms:
            return _at_least(least_ms)
        shorter = self._shorter(levers)
        if shorter is not None and not self._found[shorter].fits:
            if not self._is_host_too_small(self._choice.planner_for(shorter)):
                return "takes no less of the device than shorter segments, which do not fit"
        if levers.checkpoint_every > 1 and levers.save_attention and self._saves_no_time(levers):
            return "attention takes no time worth saving"
        return ""

    def _shorter(self, levers: Levers) -> Levers | None:
        """Return the setting with the longest segments, shorter than these, that was recorded."""
        found = [
            each
            for each in self._found
            if 0 < each.checkpoint_every < levers.checkpoint_every
            and _is_alike(each, levers)
            and self._choice.recorded(each) is not None
        ]
        return max(found, key=lambda each: each.checkpoint_every, default=None)

    def _saves_no_time(self, levers: Levers) -> bool:
        """Say whether running attention again costs next to nothing, by segments of one layer."""
        saved = dataclasses.replace(levers, checkpoint_every=1, checkpoint_nested=False)
        both = [
            self._choice.recorded(each)
            for each in (saved, dataclasses.replace(saved, save_attention=False))
        ]
        known = [_kept_ms(each) for each in both if each is not None]
        return len(known) == 2 and known[1] <= GAIN * known[0]

    def _best_so_far(self) -> Candidate | None:
        fitting = [each.candidate for each in self._found.values() if each.fits]
        return min(filter(None, fitting), key=_rank, default=None)

    def _least_ms(self, levers: Levers) -> float:
        """Return a bound below the time of any plan with *levers*."""
        choice = self._choice
        shorter = self._shorter(levers)
        if shorter is not None:
            return _kept_ms(choice.planner_for(shorter))
        plain = choice.recorded(without_segments(levers))
        if plain is None:
            return 0.0
        again_ms = 0.0
        if levers.checkpoint_every:
            again_ms = RUNS_AGAIN * forward_ms(
                plain.program, plain.stepper.times_ms, without_attention=levers.save_attention
            )
        kept = plain.kept
        # What runs again may run where compute would wait for collectives.
        return max(kept.step_ms, kept.timed.compute_ms + again_ms)

    def _is_host_too_small(self, planner: Planner) -> bool:
        """Say whether the host does not hold all that leaves with *planner*'s step."""
        everything = planner.simple().get(OFFLOAD_ALL)
        return everything is None or everything.host_bytes > planner.host_limit_bytes

    # ---- settings ------------------------------------------------------------------------------

    def _is_good_enough(self) -> bool:
        """Say whether what fits is near to what nothing can beat."""
        best = self._best_so_far()
        plain = self._choice.recorded(without_segments(self._given))
        return best is not None and plain is not None and best.step_ms <= WORTH * _kept_ms(plain)

    def _look_at_segments(self) -> None:
        for levers in self._segment_settings():
            if self._is_good_enough():
                return
            self._look_if_it_may_pay(levers)

    def _segment_settings(self) -> Iterator[Levers]:
        """Yield what ``checkpoint_every`` and ``save_attention`` may be, short segments first."""
        given, room = self._given, self._choice.room
        yield without_segments(given)
        most = max(1, self._choice.configured.program.num_layers // 2)
        if room.longest_segment is not None:
            most = min(most, room.longest_segment)
        program = self._choice.configured.program
        has_kernels = any(operation.name in KERNELS for operation in program.operations)
        saves = (False, True) if room.attention and has_kernels else (given.save_attention,)
        length = 1
        while length <= most:
            both = (False, True) if room.nested else (given.checkpoint_nested,)
            for nested in both if length > 1 else (False,):
                for save in saves:
                    yield dataclasses.replace(
                        given,
                        checkpoint_every=length,
                        checkpoint_nested=nested,
                        save_attention=save,
                    )
            length *= 2

    def _look_at_groups(self) -> None:
        """Look at attention in groups, with what is best so far, where its kernels take much."""
        near = self._chosen()
        assert near.planner is not None
        if not self._choice.room.groups or near.levers.attention_groups != "off":
            return
        saved_bytes = _attention_workspace_bytes(near.planner.program)  # at most
        if self._is_good_enough() or saved_bytes <= GROUP_BYTES:
            return
        if not near.fits and _peak_of(near) - saved_bytes > self._limit_bytes:
            return
        levers = dataclasses.replace(near.levers, attention_groups="auto")
        if levers in self._found:
            return
        if near.fits and near.candidate is not None:
            # At best, what the kernels take is free for the plan, and groups take no longer.
            least_ms = near.planner.best(self._limit_bytes + saved_bytes).step_ms
            if near.candidate.step_ms <= GAIN * least_ms:
                self._found[levers] = LookedAt(levers=levers, note=_at_least(least_ms))
                return
        self._look(levers)

    def _look_at_tiles(self) -> None:
        """Look at other numbers of tiles, with the segments that are best so far."""
        near = self._chosen()
        assert near.planner is not None
        program = near.planner.program
        if program.num_tiles < 2 or near.levers.mlp_tiles != "auto":
            return
        if near.candidate is not None and near.fits:
            if near.candidate.step_ms <= WORTH * _kept_ms(near.planner):
                return
        more = _more_tiles(program)
        if near.fits:
            self._look_on(near.levers, more)
            self._look_on(near.levers, _fewer_tiles(program))
            return
        for number in reversed(more):  # what the most tiles do not fit, fewer do not either
            if not self._look(dataclasses.replace(near.levers, mlp_tiles=number)).fits:
                return

    def _look_on(self, levers: Levers, numbers: list[int]) -> None:
        """Look at *numbers* of tiles as long as that makes it faster."""
        for number in numbers:
            before = self._best_so_far()
            found = self._look(dataclasses.replace(levers, mlp_tiles=number))
            if found.candidate is None or before is None or not found.fits:
                return
            if found.candidate.step_ms >= before.step_ms:
                return

    # ---- the choice ----------------------------------------------------------------------------

    def _chosen(self) -> LookedAt:
        configured = self._found[self._given]
        recorded = [each for each in self._found.values() if each.candidate is not None]
        fitting = [each for each in recorded if each.fits]
        if not fitting:
            return min(recorded, key=_peak_of)  # of equals the first, which is the configured one
        best = min(fitting, key=lambda each: _rank_of(each))
        if configured.fits and configured.candidate is not None and best.candidate is not None:
            if best.candidate.step_ms * GAIN >= configured.candidate.step_ms:
                return configured
        return best

    def _reason(self, configured: LookedAt, chosen: LookedAt) -> str:
        """Say why the levers are what they are."""
        room = self._choice.room
        if not (room.segments or room.tiles) and (not room.groups or chosen is configured):
            why = room.why_no_segments
            return f"layers do not run again as a whole: {why}" if why else ""
        if chosen is configured:
            return self._why_configured(configured)
        assert chosen.candidate is not None
        assert configured.candidate is not None
        what = chosen.levers.described_beside(configured.levers)
        if not chosen.fits:
            return f"{what}: no setting fits, and this one has the lowest peak"
        if not configured.fits:
            return f"{what}: the fastest that fits. As configured, {configured.note}"
        ratio = configured.candidate.step_ms / chosen.candidate.step_ms - 1
        return f"{what}: as configured, the best plan that fits takes {ratio:.1%} longer"

    def _why_configured(self, configured: LookedAt) -> str:
        if not configured.fits:
            return "as configured: no setting fits, and none has a lower peak"
        others = [each for each in self._found.values() if each is not configured]
        recorded = [each for each in others if each.planner is not None]
        fitting = [each.candidate for each in others if each.fits and each.candidate is not None]
        assert configured.candidate is not None
        if not others:
            return "as configured, which costs next to nothing: other settings were not looked at"
        if not recorded:
            return "as configured: others take as long or longer, and were not recorded"
        if not fitting:
            return "as configured: no other setting that was looked at fits"
        ratio = min(fitting, key=_rank).step_ms / configured.candidate.step_ms - 1
        gain = f"the best of the others would take {abs(ratio):.1%} "
        return f"as configured: {gain}{'longer' if ratio >= 0 else 'less, too little to change'}"


def without_segments(levers: Levers) -> Levers:
    """Return *levers* where no layer runs again as a whole."""
    return dataclasses.replace(
        levers, checkpoint_every=0, checkpoint_nested=False, save_attention=False
    )


def _is_alike(shorter: Levers, longer: Levers) -> bool:
    """Say whether two settings differ in the length of segments; those of one layer are nested."""
    if shorter.checkpoint_every == 1:
        shorter = dataclasses.replace(shorter, checkpoint_nested=longer.checkpoint_nested)
    return dataclasses.replace(shorter, checkpoint_every=longer.checkpoint_every) == longer


def forward_ms(
    program: StepProgram, times_ms: Sequence[float], *, without_attention: bool = False
) -> float:
    """Return what the layers' forward takes, in ms.

    Args:
        program: the step.
        times_ms: of each operation.
        without_attention: leave the kernels of attention out.
    """
    times_ms = without_collectives(times_ms, program.operations)
    return sum(
        times_ms[number]
        for segment in program.segments
        if segment.phase == FORWARD and segment.layer != OUTSIDE
        for number in range(segment.start, segment.end)
        if not (without_attention and program.operations[number].name in KERNELS)
    )


def _attention_workspace_bytes(program: StepProgram) -> int:
    """Return the most that a kernel of attention allocates inside."""
    kernels = (each for each in program.operations if "flash_attention" in each.name)
    return max((each.workspace_bytes for each in kernels), default=0)


def _at_least(least_ms: float) -> str:
    """Return why a setting is not looked at that takes so long."""
    return f"takes {least_ms:.4g} ms or more"


def _more_tiles(program: StepProgram) -> list[int]:
    """Return larger powers of two, as long as a tile keeps matrix products efficient."""
    most = program.num_tiled_tokens // MIN_TILE_TOKENS
    return [n for n in (2**power for power in range(1, 31)) if program.num_tiles < n <= most]


def _fewer_tiles(program: StepProgram) -> list[int]:
    """Return smaller powers of two, the largest first."""
    return [2**power for power in range(30, 0, -1) if 2**power < program.num_tiles]


def _kept_ms(planner: Planner) -> float:
    """Return what the step takes where nothing leaves: its compute."""
    return planner.kept.step_ms


def _rank(candidate: Candidate) -> tuple[float, int]:
    return (float(f"{candidate.step_ms:.6g}"), candidate.peak_bytes)


def _rank_of(looked: LookedAt) -> tuple[float, int]:
    assert looked.candidate is not None
    return _rank(looked.candidate)


def _peak_of(looked: LookedAt) -> int:
    assert looked.candidate is not None
    return looked.candidate.peak_bytes
