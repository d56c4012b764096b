"""What may be done where a micro-batch does not fit: a tighter policy, for the rest of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from hf_pyao.integrations.lever_switch import LeverSwitch
from hf_pyao.integrations.module_map import FoundLayers, named_submodules
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.policy import OffloadAll, RecomputeSelected


@runtime_checkable
class Tightening(Protocol):
    """Makes room after an out-of-memory error."""

    def tighter(self, error: torch.OutOfMemoryError) -> str | None:
        """Have a policy decide from now on that holds less on the device than the one before.

        Called after each failed try of a micro-batch, until it fits. What failed has been released
        by then only in part: nothing may be allocated here.

        Args:
            error: what ended the try; it must not be kept, since it holds the try's tensors.

        Returns:
            What is done from now on, to follow "from now on"; None if nothing tighter is known.
        """
        ...


_Rung: TypeAlias = Callable[["OffloadLadder"], str | None]


class OffloadLadder:
    """Offloads everything; then recomputes all that can be; then waits for every copy.

    Where the user has chosen to offload less, or nothing, that gives way: the run would end
    otherwise. Codecs and the limit on host memory stay, so that what was lossless stays so.

    Args:
        engine: whose policy is changed.
        found: the model's layers.
        switch: knows whether layers run again as a whole.
        min_bytes: least size of what is offloaded.
        offloads_first: the configuration keeps something that may be offloaded, and recomputes
            nothing; what recomputes already would only hold more.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        found: FoundLayers,
        switch: LeverSwitch,
        *,
        min_bytes: int,
        offloads_first: bool,
    ) -> None:
        self._engine = engine
        self._everything = OffloadAll(min_bytes)
        self._paths = paths_of(found)
        self._switch = switch
        # Functions and not bound methods: those would hold this object, which holds them.
        rungs: list[_Rung] = [OffloadLadder._recompute, OffloadLadder._wait_for_copies]
        if offloads_first:
            rungs.insert(0, OffloadLadder._offload)
        self._rungs = iter(rungs)

    def tighter(self, error: torch.OutOfMemoryError) -> str | None:
        """Take the next rung; None behind the last."""
        return next((done for rung in self._rungs if (done := rung(self)) is not None), None)

    def _offload(self) -> str:
        self._engine.use(self._everything)
        return "everything that the layers save is offloaded"

    def _recompute(self) -> str | None:
        if self._switch.levers.checkpoint_every:  # layers run again as a whole already
            return None
        policy = RecomputeSelected(self._everything, self._paths, is_pointwise=True)
        self._engine.use(policy)
        return (
            "all that can be computed again from the layers' inputs is recomputed, and what else "
            "they save is offloaded"
        )

    def _wait_for_copies(self) -> str:
        self._engine.use(self._everything)
        self._engine.wait_for_every_copy()
        return (
            "everything that the layers save is offloaded, nothing is brought back ahead of its "
            "use, and compute waits for every copy"
        )


class Plans(Tightening, Protocol):
    """Plans for less memory, as long as there is a tighter plan."""

    def stop_planning(self) -> None:
        """Plan no more: something else decides from now on."""
        ...


class PlansFirst:
    """Takes tighter plans, and the ladder where there are none.

    Args:
        plans: policy ``auto``.
        ladder: what comes behind it.
    """

    def __init__(self, plans: Plans, ladder: Tightening) -> None:
        self._plans: Plans | None = plans
        self._ladder = ladder

    def tighter(self, error: torch.OutOfMemoryError) -> str | None:
        """Take the next plan, or rung; None behind the last."""
        if self._plans is not None:
            sentence = self._plans.tighter(error)
            if sentence is not None:
                return sentence
            self._plans.stop_planning()
            self._plans = None
        return self._ladder.tighter(error)


def paths_of(found: FoundLayers) -> Mapping[str, frozenset[str]]:
    """Return the paths of all sub-modules of each layer, by the layer's name."""
    return {
        fqn: frozenset(path for path, _ in named_submodules(layer)) for fqn, layer in found.layers
    }
