"""What may be chosen of the levers, what was looked at, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.levers import Levers
from hf_pyao.plan.solve.planner import Candidate, Planner


@dataclass(frozen=True, kw_only=True)
class LeverRoom:
    """Which levers may be chosen."""

    segments: bool = False
    """``checkpoint_every``."""
    nested: bool = False
    """``checkpoint_nested``, in segments of more than one layer."""
    attention: bool = False
    """``save_attention``, where layers run again."""
    tiles: bool = False
    """The number of tiles."""
    groups: bool = False
    """``attention_groups``, ``"auto"`` where they are off."""
    longest_segment: int | None = None
    """Most layers of a segment; None: half of the model's."""
    why_no_segments: str = ""
    """Why :attr:`segments` is False, to be said; empty if there is nothing to say."""


FIXED = LeverRoom()
"""Nothing is chosen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LookedAt:
    """A setting, and its best plan."""

    levers: Levers
    planner: Planner | None = None
    """None: the step was not recorded."""
    candidate: Candidate | None = None
    """Its fastest plan that fits, or the one with the lowest peak."""
    fits: bool = False
    note: str = ""
    """Why it was not recorded, or why nothing fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenLevers:
    """What was chosen, and from what."""

    levers: Levers
    planner: Planner
    """For the step with these levers."""
    candidate: Candidate
    """Its plan."""
    fits: bool
    """False: no plan of any setting does; this one has the lowest peak."""
    configured: Planner
    """For the step as configured."""
    looked_at: tuple[LookedAt, ...]
    """All settings that were thought of, that of the configuration first."""
    reason: str
    """Why these levers, in words; empty where nothing was free."""
    error: str = ""
    """What to say where nothing fits."""
