"""Chooses what changes the step itself, above :class:`Planner`, which plans a step as it is.

A *setting* of the levers (segments of how many layers, attention saved or not, how many tiles)
makes another step, which is recorded, and has a planner of its own. To record costs time, and a
plan tensor by tensor is as fast wherever it fits. So the rows of
:mod:`~hf_pyao.plan.options.variants` are looked at one after the other only as long as nothing fits
the device and the host, and where nothing of a layer can be made again tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.levers import Levers, LeversRefusedError
from hf_pyao.plan.options.chosen_levers import FIXED, ChosenLevers, LeverRoom, LookedAt
from hf_pyao.plan.options.variants import PLAIN_ROW, ROWS, LeverRow
from hf_pyao.plan.solve.candidate import Candidate
from hf_pyao.plan.solve.planner import NoPlanFitsError, Planner
from hf_pyao.plan.solve.steering import GAIN, WORTH

PlannerWith = Callable[[Levers], Planner]
"""Records the step with other levers, and returns its planner; raises LeversRefusedError."""


class LeverChoice:
    """Plans a step with each setting of its levers that is needed, and keeps the planners.

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
        """Return the fastest plan within *limit_bytes* of the settings that are looked at.

        A plan for another setting than the configured one is faster than its by
        :data:`~hf_pyao.plan.solve.steering.GAIN`. Where nothing fits, it is what has the lowest
        peak.
        """
        found = {self.levers: self._look(self.levers, limit_bytes)}
        configured = found[self.levers]
        rows = [PLAIN_ROW] if self.levers.checkpoint_every else []
        for row in (*rows, *ROWS):
            near = _nearest(configured, found)
            if row.is_free(self.room) and (row is PLAIN_ROW or self._is_needed(near, row)):
                self._look_at(row, near, found, limit_bytes)
        chosen = _nearest(configured, found)
        assert chosen.planner is not None
        assert chosen.candidate is not None
        return ChosenLevers(
            levers=chosen.levers,
            planner=chosen.planner,
            candidate=chosen.candidate,
            fits=chosen.fits,
            configured=self.configured,
            looked_at=tuple(found.values()),
            reason=self._reason(configured, chosen, len(found)),
            error="" if chosen.fits else chosen.note,
        )

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

    def _is_needed(self, near: LookedAt, row: LeverRow) -> bool:
        """Say whether nothing fits, or nothing can be made again tensor by tensor and it pays."""
        if not near.fits:
            return True
        planner, candidate = near.planner, near.candidate
        assert planner is not None
        assert candidate is not None
        makes_again = planner.stepper.search is not None or near.levers.checkpoint_every > 0
        return not makes_again and candidate.step_ms > WORTH * planner.kept.step_ms

    def _look_at(
        self, row: LeverRow, near: LookedAt, found: dict[Levers, LookedAt], limit_bytes: float
    ) -> None:
        """Look at the settings of a row until one fits."""
        assert near.planner is not None
        for levers in row.install(near.levers, near.planner.program, self.room):
            if levers not in found:
                found[levers] = self._look(levers, limit_bytes)
                if found[levers].fits:
                    return

    def _look(self, levers: Levers, limit_bytes: float) -> LookedAt:
        """Plan with *levers*, recording the step if need be."""
        try:
            planner = self.planner_for(levers)
        except LeversRefusedError as error:
            return LookedAt(levers=levers, note=f"{error}")
        note = ""
        try:
            candidate = planner.best(limit_bytes)
        except NoPlanFitsError as error:
            note, candidate = f"{error}", planner.least()
        return LookedAt(
            levers=levers, planner=planner, candidate=candidate, fits=not note, note=note
        )

    def _reason(self, configured: LookedAt, chosen: LookedAt, num_looked_at: int) -> str:
        """Say why the levers are what they are."""
        room = self.room
        if not (room.segments or room.tiles) and (not room.groups or chosen is configured):
            why = room.why_no_segments
            return f"layers do not run again as a whole: {why}" if why else ""
        if chosen is not configured:
            what = chosen.levers.described_beside(configured.levers)
            if not chosen.fits:
                return f"{what}: no setting fits, and this one has the lowest peak"
            if not configured.fits:
                return f"{what}: the fastest that fits. As configured, {configured.note}"
            assert chosen.candidate is not None
            assert configured.candidate is not None
            ratio = configured.candidate.step_ms / chosen.candidate.step_ms - 1
            return f"{what}: as configured, the best plan that fits takes {ratio:.1%} longer"
        if not configured.fits:
            return "as configured: no setting fits, and none has a lower peak"
        if num_looked_at == 1:
            return "as configured, which fits: other settings were not looked at"
        return "as configured: no other setting that was looked at is faster and fits"


def _nearest(configured: LookedAt, found: dict[Levers, LookedAt]) -> LookedAt:
    """Return what is chosen of *found*: the fastest that fits, or else the lowest peak."""
    recorded = [each for each in found.values() if each.candidate is not None]
    fitting = [each for each in recorded if each.fits]
    if not fitting:
        return min(recorded, key=_peak_of)  # of equals the first, which is the configured one
    best = min(fitting, key=_rank_of)
    if configured.fits and _rank_of(best)[0] * GAIN >= _rank_of(configured)[0]:
        return configured
    return best


def _rank_of(looked: LookedAt) -> tuple[float, int]:
    assert looked.candidate is not None
    return looked.candidate.rank()


def _peak_of(looked: LookedAt) -> int:
    assert looked.candidate is not None
    return looked.candidate.peak_bytes
