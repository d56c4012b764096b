"""What there is to decide for a step, as numbers: slots, ways to rebuild them, time on the link.

Layers that save the same and compute the same are one group, and what is decided is for how many of
its layers. So a model of eighty layers is no larger a problem than one of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_pyao.plan.hardware.speeds import LinkModel


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to have a slot written on the host."""

    codec: str | None
    """None: as the configuration says."""
    offload_ms: float
    """On the link, to the host."""
    reload_ms: float
    """On the link, back."""
    host_bytes: int
    forward_ms: float = 0.0
    """What encoding takes of compute."""
    backward_ms: float = 0.0
    """What decoding takes of compute."""


@dataclass(frozen=True, kw_only=True)
class SlotChoice:
    """A slot of every layer of a group."""

    name: str
    nbytes: int
    """What it holds of the device where it is kept."""
    ways: tuple[Way, ...] = ()
    """How it may leave; none: it does not."""
    maker: int | None = None
    """The step that makes it, by position in the group; None: it cannot be rebuilt."""
    is_rebuilt: bool = False
    """It is rebuilt in all layers: that is given."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A value that is not saved, and can be stored to rebuild others from."""

    nbytes: int
    ways: tuple[Way, ...]
    maker: int | None = None
    """What can make it again instead; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class RebuildStep:
    """An operation that can run again."""

    elapsed_ms: float
    needs: tuple[int, ...] = ()
    """Steps that must run before it, by position."""
    sources: tuple[int, ...] = ()
    """Values that must be stored, or made again, by position among the group's sources."""
    path: str = ""
    """The sub-module that runs it."""
    is_product: bool = False
    """A matrix product or attention: what it makes is stored, where it is not allowed to run."""


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that are equal."""

    layers: tuple[int, ...]
    """Their positions in forward order."""
    slots: tuple[SlotChoice, ...]
    steps: tuple[RebuildStep, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many there are."""
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """What is to be decided, and within which limits.

    Time is compute, what is computed again, and what compute waits for copies: forward hides
    ``forward_ms`` of copies to the host, backward its own time and what is rebuilt in it. With one
    copy engine both directions, and the gradients', share one budget.
    """

    groups: tuple[LayerGroup, ...]
    forward_ms: float
    """Compute under which copies to the host run: the layers' forward, and what the window lets
    pass under what follows."""
    backward_ms: float
    """Compute under which copies back run."""
    gradient_ms: float = 0.0
    """Time on the link of gradients that leave in backward."""
    copy_engines: int = 2
    kept_bytes: float = float("inf")
    """Most bytes that may be kept."""
    host_bytes: float = float("inf")
    """Most bytes of host memory."""


def way_of(nbytes: int, link: LinkModel, codec: str | None = None) -> Way:
    """Return the way of *nbytes* over *link* as they are."""
    return Way(
        codec=codec,
        offload_ms=link.copy_ms("offload", nbytes),
        reload_ms=link.copy_ms("reload", nbytes),
        host_bytes=nbytes,
    )


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """What is decided for a group: how many of its layers do what."""

    kept: tuple[int, ...]
    """By slot."""
    offloaded: tuple[tuple[int, ...], ...]
    """By slot and way."""
    rebuilt: tuple[int, ...]
    """By slot."""
    runs: tuple[int, ...]
    """By step: in how many layers it runs again."""
    stored: tuple[tuple[int, ...], ...]
    """By source: kept, and then by way."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """What is decided."""

    groups: tuple[GroupChoice, ...]
    overhead_ms: float
    """Rebuilding, coding and waiting, by the problem's own estimate."""

    def products(self, problem: PlanProblem) -> frozenset[str]:
        """Return the sub-modules whose matrix products run again somewhere."""
        return frozenset(
            step.path
            for group, choice in zip(problem.groups, self.groups, strict=True)
            for step, runs in zip(group.steps, choice.runs, strict=True)
            if runs and step.is_product
        )


def overhead_ms(problem: PlanProblem, groups: Sequence[GroupChoice]) -> float:
    """Return what choices cost beside plain compute, without checking that they hold."""
    offload_ms = reload_ms = forward_ms = backward_ms = 0.0
    for group, choice in zip(problem.groups, groups, strict=True):
        counted = [
            *(
                (slot.ways, numbers)
                for slot, numbers in zip(group.slots, choice.offloaded, strict=True)
            ),
            *((source.ways, n[1:]) for source, n in zip(group.sources, choice.stored, strict=True)),
        ]
        for ways, numbers in counted:
            for way, number in zip(ways, numbers, strict=True):
                offload_ms += number * way.offload_ms
                reload_ms += number * way.reload_ms
                forward_ms += number * way.forward_ms
                backward_ms += number * way.backward_ms
        backward_ms += sum(
            step.elapsed_ms * runs for step, runs in zip(group.steps, choice.runs, strict=True)
        )
    in_forward_ms = problem.forward_ms + forward_ms
    in_backward_ms = problem.backward_ms + backward_ms
    stall_forward_ms = max(0.0, offload_ms - in_forward_ms)
    back_ms = reload_ms + (problem.gradient_ms if problem.copy_engines == 1 else 0.0)
    stall_backward_ms = max(0.0, back_ms - in_backward_ms)
    return forward_ms + backward_ms + stall_forward_ms + stall_backward_ms
