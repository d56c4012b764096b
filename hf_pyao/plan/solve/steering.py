"""All numbers that steer the search for a plan, each with its reason."""

from __future__ import annotations

# ---- speeds --------------------------------------------------------------------------------------

MEASURED = (1.0,)
"""By which factors a link may be faster than said, where speeds were measured: a run corrects them
as it goes (``correction.py``)."""

PRESET = (0.7 / 1.3, 1.0, 1.3 / 0.7)
"""The same for speeds from a data sheet: link and compute may each be off by 30 %. Where both are
off by the same factor, all plans are faster or slower by it, so that only the ratio matters."""

SEARCHED = (1.0, 0.73, PRESET[0])
"""Links for which a plan is searched where speeds are not measured: a plan for the link as given
copies too much for a slow one. 0.73 is half way to the slowest."""

NEVER_SLOWER = 0.02
"""By how much a plan may be slower than a plain way at any speed that is possible. A bound of 0
would leave plain ways only; users notice more than 2 %."""

# ---- the chain of variants -----------------------------------------------------------------------

SMALL_VARIANT = 0.01
"""Share of a layer's bytes. A variant that frees less more than the one before joins the next: six
variants are nearly as good as the whole chain, so that small differences are not worth a walk."""

# ---- walks ---------------------------------------------------------------------------------------

NUM_STARTS = 3
"""Rungs, of those that sums find the fastest, from which the search starts. One does nearly as
well; sums do not know the order of copies."""

NUM_FITS = 6
"""Walks at most to find how few slots may leave. With 3, GPT-2 loses 1 %."""

HALF, NEAR = 1 / 2, 1 / 8
"""Share of the layers that the first step up or down the chain is of. Small where a plan fits, and
only a window, the last layers, their order or a codec differs: the best rung is near then."""

SHORT = 1 / 128
"""Share of the limit that a plan is taken to lack where the allocator refuses it, and twice that
the next time: what it lacks would take a dozen replays."""

ROUGHLY = 1.005
"""What runs again takes about what sums say: a plan that is slower by more is not walked."""

FREE = 1.002
"""Times keeping everything, which nothing beats: where a plan is no slower, the search ends."""

LESS_WINDOW = 4
"""A tighter window is so many times smaller: of use where memory costs time."""

# ---- what else may change ------------------------------------------------------------------------

LOSSY_GAIN = 1.02
"""A plan with a lossy codec is chosen only if it is faster by this factor: the time that coding
takes is an estimate."""

WORTH = 1.02
"""Times keeping everything: a plan that takes no longer is not improved on."""

GAIN = 1.01
"""Another setting of the levers is chosen only if its plan is faster than that of the configured
step by this factor: the time that layers take to run again is an estimate."""
