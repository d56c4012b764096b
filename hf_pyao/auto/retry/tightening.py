"""The ladder for micro-batches that do not fit: tighter policies, for the rest of the run.

The rungs: offload everything; then recompute all that can be; then wait for every copy. They apply
even where the user has chosen to offload less, or nothing, since the run would end otherwise.
Codecs and the limit on host memory stay, so that a lossless run stays lossless. With policy
``auto`` tighter plans come first. Where ``stream_weights`` is ``"auto"``, all frozen weights are
streamed before the first rung. The machine in ``hf_pyao.auto.machine`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch

from hf_pyao.auto.install.lever_switch import LeverSwitch
from hf_pyao.auto.machine import events as on
from hf_pyao.auto.machine.driver import Driver
from hf_pyao.auto.machine.states import Target
from hf_pyao.model.map.found_layers import FoundLayers
from hf_pyao.model.map.wrappers import named_submodules


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


class MachineTightening:
    """Asks the machine for a tighter plan, or the next rung of the ladder.

    Args:
        driver: of the machine.
        switch: knows whether layers run again as a whole.
        can_stream_more: says whether frozen weights stay that could be streamed.
    """

    def __init__(
        self,
        driver: Driver,
        switch: LeverSwitch,
        can_stream_more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._driver = driver
        self._switch = switch
        self._can_stream_more = can_stream_more

    def tighter(self, error: torch.OutOfMemoryError) -> str | None:
        """Let the machine decide; None after the last rung."""
        runs_again = bool(self._switch.levers.checkpoint_every)
        return self._driver.send(on.OutOfMemory(runs_again, self._can_stream_more()))


def rungs_of(*, keeps_some: bool, recomputes: bool, has_segments: bool) -> tuple[Target, ...]:
    """Return the rungs of the ladder, in order.

    Offloading everything comes first where the configuration keeps something that may be offloaded.
    Where single slots are recomputed, offloading them would hold more, so that it is left out.

    Args:
        keeps_some: the configuration keeps something that may be offloaded.
        recomputes: the policy may recompute single slots.
        has_segments: layers run again as a whole in backward.
    """
    rungs = (Target.RECOMPUTED, Target.WAITING)
    offloads_first = keeps_some and (has_segments or not recomputes)
    return (Target.EVERYTHING, *rungs) if offloads_first else rungs


def paths_of(found: FoundLayers) -> Mapping[str, frozenset[str]]:
    """Return the paths of all sub-modules of each layer, by the layer's name."""
    return {
        fqn: frozenset(path for path, _ in named_submodules(layer)) for fqn, layer in found.layers
    }
