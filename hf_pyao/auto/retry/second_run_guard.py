"""Checks whether second runs failed, or gave backward other bits than first runs.

Bits are checked before an optimizer steps, at the end of a micro-batch that ``run_micro_batch``
runs, and as the model is detached; failures before the next forward. ``recompute.verification``
compares bits and notes failures. A micro-batch whose second runs differ is not repeated: the state
that made them differ has moved on, so that it would be another one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_pyao.engine.recompute.verification import SecondRunCheck, Wrong
from hf_pyao.errors import RecomputationError, warn

logger = logging.getLogger(__name__)

_MOST_NAMES = 3
_DIFFERS = "the second run of a layer gave other tensors than forward"
_FAILED = "the second run of a layer has failed"


_WhatIsDone: TypeAlias = Callable[[Collection[Wrong], str], str]


class SecondRunGuard:
    """Reads a check before each step and forward, after micro-batches, and at the end.

    Args:
        model: whose gradients are discarded where they are wrong; held weakly.
        check: compares second runs with first runs.
        without_second_runs: has layers run once from the next forward on; given those that ran
            wrongly, and a sentence that says so, returns what is done from then on, to follow "from
            now on".
    """

    def __init__(
        self, model: nn.Module, check: SecondRunCheck, without_second_runs: _WhatIsDone
    ) -> None:
        self._model = weakref.ref(model)
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
        """Read what was compared since the last time, and discard gradients that are wrong.

        The host waits for the device only if something was compared.

        Raises:
            RecomputationError: a second run gave backward other bits than the first run.
        """
        wrong = self._check.read()
        self._say_unsteady()
        if wrong:
            done = self._without_second_runs(wrong, _DIFFERS)
            model = self._model()
            if model is not None:
                model.zero_grad()
            raise _wrong(wrong, done)

    def before_forward(self) -> None:
        """Have layers run once in this forward if the second run of one has failed before it.

        In a loop of the user's own, the error has ended a backward; going on is up to the loop.
        """
        if self._check.has_failed:
            failed = self._check.take_failed()
            done = self._without_second_runs(failed, _FAILED)
            why = next(iter(failed.values()), "")
            warn(
                logger,
                "second-run-differs",
                "%s could not run again in backward (%s): from now on %s.",
                _names(failed),
                why,
                done,
            )

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


def _names(wrong: Collection[Wrong]) -> str:
    layers = list(dict.fromkeys(each.layer for each in wrong))
    names = ", ".join(map(repr, layers[:_MOST_NAMES]))
    more = len(layers) - _MOST_NAMES
    names += f" and {more} more" if more > 0 else ""
    return f"layer{'' if len(layers) == 1 else 's'} {names}"


def _wrong(wrong: Sequence[Wrong], done: str) -> RecomputationError:
    return RecomputationError(
        f"{_names(wrong)} saved other tensors in the second run than in forward: the gradients "
        "since the last step were wrong and have been discarded, and the optimizer has not "
        f"stepped. Repeat the step; from the next forward on {done}. A layer that runs again must "
        "compute the same each time that it gets the same: state outside of the layer, clocks and "
        "files are not put back. For this model give checkpoint_every=0, mlp_tiles='off' and no "
        "recompute_modules. (verify_recompute='off' ends the comparison.)",
        key="second-run-differs",
    )
