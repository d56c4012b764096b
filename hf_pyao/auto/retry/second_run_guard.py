"""Checks whether second runs failed, or gave backward other bits than first runs.

Bits are checked before an optimizer steps, failures before the next forward, and both after a
micro-batch that can run again. ``recompute.verification`` compares bits and notes failures.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_pyao.engine.recompute.verification import SecondRunCheck, Wrong
from hf_pyao.errors import RecomputationError, warn

logger = logging.getLogger(__name__)

_MOST_NAMES = 3
_DIFFERS = "the second run of a layer gave other tensors than forward"
_FAILED = "the second run of a layer has failed"


_WhatIsDone: TypeAlias = Callable[[Collection[Wrong], str], str]


class SecondRunGuard:
    """Reads a check before each step and forward, and after micro-batches that can run again.

    Args:
        check: compares second runs with first runs.
        without_second_runs: has layers run once from the next forward on; given those that ran
            wrongly, and a sentence that says so, returns what is done from then on, to follow "from
            now on".
    """

    def __init__(self, check: SecondRunCheck, without_second_runs: _WhatIsDone) -> None:
        self._check = check
        self._without_second_runs = without_second_runs
        self._said_unsteady: set[str] = set()
        self._remove: weakref.finalize[..., SecondRunGuard] | None = None

    def start(self) -> None:
        """Look before each step of every optimizer of torch's, until :meth:`end`."""
        if self._check.mode == "off":
            return
        guard = weakref.ref(self)

        def before_step(*_: Any) -> None:
            known = guard()
            if known is not None:
                known.raise_if_wrong()

        # Also where the guard goes without an end: torch holds the hook for the whole process.
        self._remove = weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def end(self) -> None:
        """Look no more. Twice is fine."""
        if self._remove is not None:
            self._remove()

    def forget(self) -> None:
        """Drop what was compared since the last time: its micro-batch has failed."""
        self._check.forget()

    def raise_if_wrong(self) -> None:
        """Read what was compared since the last time.

        The host waits for the device only if something was.

        Raises:
            RecomputationError: a second run gave backward other bits than the first run.
        """
        wrong = self.find_wrong()
        if wrong:
            done = self._without_second_runs(wrong, _DIFFERS)
            raise _wrong(wrong, "the optimizer has not stepped", done)

    def do_without_second_runs(self, wrong: Sequence[Wrong], reason_not_undone: str) -> None:
        """Have layers run once, so that a micro-batch can run again that has just ended.

        Args:
            wrong: what :meth:`find_wrong` has returned for it.
            reason_not_undone: why it cannot run again; empty if it can.

        Raises:
            RecomputationError: it cannot.
        """
        done = self._without_second_runs(wrong, _DIFFERS)
        if reason_not_undone:
            raise _wrong(wrong, f"it cannot run again, since {reason_not_undone}", done)
        warn(
            logger,
            "second-run-differs",
            "%s. The micro-batch runs again: from now on %s.",
            _described(wrong),
            done,
        )

    @property
    def has_failed(self) -> bool:
        """True if a second run has ended with an error, and layers run again still."""
        return self._check.has_failed

    def take_back(self) -> None:
        """Have layers run once, since the second run of one has failed in a micro-batch."""
        self.forget()
        warn(
            logger,
            "second-run-differs",
            "%s. The micro-batch runs again.",
            self._do_without_failed(),
        )

    def before_forward(self) -> None:
        """Have layers run once in this forward if the second run of one has failed before it.

        In a loop of the user's own, the error has ended a backward; going on is up to the loop.
        """
        if self._check.has_failed:
            warn(logger, "second-run-differs", "%s.", self._do_without_failed())

    def _do_without_failed(self) -> str:
        failed = self._check.take_failed()
        done = self._without_second_runs(failed, _FAILED)
        why = next(iter(failed.values()), "")
        return f"{_names(failed)} could not run again in backward ({why}): from now on {done}"

    def find_wrong(self) -> Sequence[Wrong]:
        """Return the layers that gave other tensors in their second run than in forward."""
        wrong = self._check.read()
        self._say_unsteady()
        return wrong

    def _say_unsteady(self) -> None:
        fresh = [name for name in self._check.unsteady_layers if name not in self._said_unsteady]
        if fresh:
            self._said_unsteady.update(fresh)
            warn(
                logger,
                "kernels-not-deterministic",
                "kernels of layer %s%s do not give the same bits twice: second runs are compared "
                "with a bound there (verify_recompute).",
                repr(fresh[0]),
                f" and {len(fresh) - 1} more" if len(fresh) > 1 else "",
            )


def _described(wrong: Sequence[Wrong]) -> str:
    return f"{_names(wrong)} saved other tensors in the second run than in forward"


def _names(wrong: Collection[Wrong]) -> str:
    layers = list(dict.fromkeys(each.layer for each in wrong))
    names = ", ".join(map(repr, layers[:_MOST_NAMES]))
    more = len(layers) - _MOST_NAMES
    names += f" and {more} more" if more > 0 else ""
    return f"layer{'' if len(layers) == 1 else 's'} {names}"


def _wrong(wrong: Sequence[Wrong], what: str, done: str) -> RecomputationError:
    return RecomputationError(
        f"{_described(wrong)}: the gradients of this micro-batch are wrong, and {what}. Call "
        f"zero_grad() before you go on; from the next forward on {done}. A layer that runs again "
        "must compute the same each time that it gets the same: state outside of the model, "
        "clocks and files are not put back. For this model give checkpoint_every=0, "
        "mlp_tiles='off' and no recompute_modules. (verify_recompute='off' ends the comparison.)",
        key="second-run-differs",
    )
