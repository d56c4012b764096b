"""Lines that a user sees without setting up any logging."""

from __future__ import annotations

import logging
from collections.abc import Callable


def announce(line: str, write: Callable[[str], object]) -> None:
    """Show a *line* that hf_pyao's logger has got at level INFO, unless that shows it already.

    Python shows only warnings and errors of a logger that nobody has set up. That offloading is on,
    and what it came to, is no warning, and yet a user wants to see it. Where hf_pyao's logger is
    set to errors alone, nothing is shown.

    Args:
        line: what to show.
        write: how the surrounding program shows a line.
    """
    level = logging.getLogger("hf_pyao").getEffectiveLevel()
    if logging.INFO < level <= logging.WARNING:
        write(line)
