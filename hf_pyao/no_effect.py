"""Settings that are switched on and do nothing: a typed fact each, a warning, a line in the report.

A setting without effect is no error: training goes on, and its result is right. One line says what
was expected, what was seen, why, and what to do. Whoever finds such a setting notes it in the
:class:`EffectLedger` of its attachment: the engine (``engine/runtime/idle_warnings.py``), the
comparison after the first micro-batches, and the look at model and training arguments
(``auto/effects/``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hf_pyao.errors import warn
from hf_pyao.metrics import MicroBatchStats

logger = logging.getLogger(__name__)

OFFLOADING = "offloading"
"""The setting whose effect is that saved tensors leave the device."""


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """A setting that does nothing. The parts are phrases without a full stop."""

    setting: str
    """The setting, as the user gave it: its name, and its value where that matters."""
    expected: str
    """What it should have done."""
    seen: str
    """What was seen instead."""
    reason: str
    """Why."""
    remedy: str
    """What to do."""

    @property
    def key(self) -> str:
        """Of TROUBLESHOOTING.md: what the warning ends with."""
        return "nothing-offloaded" if self.setting == OFFLOADING else "no-effect"

    @property
    def line(self) -> str:
        """The fact in one line."""
        return (
            f"{self.setting} has no effect. Expected: {self.expected}. Seen: {self.seen}. "
            f"Reason: {self.reason}. Remedy: {self.remedy}."
        )

    def to_dict(self) -> dict[str, str]:
        """Return the parts as plain values."""
        return dataclasses.asdict(self)


class EffectLedger:
    """The settings of one attachment that were found without effect, each warned about once."""

    def __init__(self) -> None:
        self._facts: dict[str, NoEffect] = {}
        self._compare: Callable[[], object] | None = None
        self._num_left = 0

    @property
    def facts(self) -> tuple[NoEffect, ...]:
        """What was found so far, oldest first."""
        return tuple(self._facts.values())

    def note(self, fact: NoEffect, *, is_said: bool = False) -> None:
        """Record *fact*, and warn; nothing happens if its setting was noted before.

        *is_said*: its reason was logged already, by the part that found it; do not warn again.
        """
        if fact.setting not in self._facts:
            self._facts[fact.setting] = fact
            if not is_said:
                warn(logger, fact.key, "%s", fact.line)

    def compare_after(self, num_micro_batches: int, compare: Callable[[], object]) -> None:
        """Call *compare* once, when *num_micro_batches* are over."""
        self._num_left, self._compare = num_micro_batches, compare

    def micro_batch_is_over(self, stats: MicroBatchStats) -> None:
        """Count a micro-batch in which a layer saved something."""
        if self._compare is not None and stats.num_packs:
            self._num_left -= 1
            if self._num_left <= 0:
                self.compare_now()

    def compare_now(self) -> None:
        """Compare what is seen by now, if that was not done yet."""
        compare, self._compare = self._compare, None
        if compare is not None:
            compare()
