"""Policies: which saved tensors leave the device. Decisions are values that carry their reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from hf_pyao.codecs import Codec
from hf_pyao.runtime.slots import Slot

BELOW_MIN_BYTES = "below min_bytes"
LAST_LAYER = "last layer"
NOT_SELECTED = "not selected"
POLICY_OFF = "policy off"

POINTWISE = "pointwise"
"""In ``recompute_modules``: whatever can be rebuilt without a matrix product, in any sub-module."""


@dataclass(frozen=True)
class Keep:
    """Leave the tensor on the device."""

    reason: str
    """Short and constant, since reports count by it."""


@dataclass(frozen=True)
class Offload:
    """Move the tensor to the host."""

    codec: Codec | None = None
    """How to write it; None: the configuration's codec."""


@dataclass(frozen=True)
class Recompute:
    """Drop the tensor, and rebuild it in backward from what else is there."""

    otherwise: Keep | Offload
    """What becomes of it if it cannot be rebuilt, and of what must be stored to rebuild it."""


Decision = Keep | Offload | Recompute

# Made once: a policy is asked for every saved storage.
_OFFLOAD = Offload()
_KEEP_SMALL = Keep(BELOW_MIN_BYTES)
_KEEP_NOT_SELECTED = Keep(NOT_SELECTED)
_KEEP_OFF = Keep(POLICY_OFF)
_KEEP_LAST = Keep(LAST_LAYER)


class Situation(NamedTuple):
    """What is known of a slot beside its name, when a policy is asked."""

    is_last_run: bool = True
    """False if its layer, as far as known from the forward before, runs again in this forward."""
    producer: str | None = None
    """Sub-module that made it, where the layer is traced; None where it is not, or if it was made
    outside of the layer."""
    stays: str | None = None
    """Why it stays on the device whatever is decided: it is shared by layers, say. None if the
    decision counts."""


class LayerRun(NamedTuple):
    """One execution of a layer, before it begins."""

    layer: str
    """Qualified name of the layer."""
    layer_index: int
    """Position of the layer in forward order."""
    is_last_run: bool = True
    """As in :class:`Situation`."""


Selection = Mapping[str, frozenset[str]]
"""Layer name -> paths of selected sub-modules in it; ``""`` is the layer itself."""


@runtime_checkable
class Policy(Protocol):
    """Decides, for each distinct saved storage of a layer call, what becomes of it.

    It is asked inside the pack hook for all that autograd saves in a layer but parameters and
    buffers, and for anchors; of what stays in any case (``situation.stays``) it only hears. It must
    be cheap and must not touch data. An attribute ``is_static = True`` says that decisions follow
    from the arguments alone: it is then asked once for each slot, not in every call.
    """

    name: str

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Return what becomes of *slot*."""
        ...


class OffloadAll:
    """Offload everything that is large enough to be worth a copy."""

    is_static = True

    def __init__(self, min_bytes: int, name: str = "all") -> None:
        self.min_bytes = min_bytes
        self.name = name

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Offload unless the storage is smaller than ``min_bytes``."""
        return _OFFLOAD if slot.nbytes >= self.min_bytes else _KEEP_SMALL


class OffloadModules:
    """Offload what the selected sub-modules saved first (Megatron-Core's ``offload_modules``)."""

    name = "modules"
    is_static = True

    def __init__(self, min_bytes: int, selected: Selection) -> None:
        self.min_bytes = min_bytes
        self.selected = selected

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Offload if a selected sub-module saved it and it is not smaller than ``min_bytes``."""
        if slot.path not in self.selected.get(slot.layer, ()):
            return _KEEP_NOT_SELECTED
        return _OFFLOAD if slot.nbytes >= self.min_bytes else _KEEP_SMALL


@runtime_checkable
class RecomputingPolicy(Policy, Protocol):
    """A policy that may decide to recompute."""

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Return the sub-modules whose matrix products and attention may run again.

        None if nothing of this run of the layer is recomputed: its operations are not traced then.
        """
        ...


class RecomputeSelected:
    """Recompute what the selected sub-modules save or make; a base policy decides on the rest.

    So do Megatron-Core's offload and fine-grained recomputation compose.
    """

    def __init__(self, base: Policy, selected: Selection, *, is_pointwise: bool = False) -> None:
        """Wrap *base*.

        Args:
            base: decides on what is not selected, or cannot be rebuilt.
            selected: sub-modules, whose matrix products may run again too.
            is_pointwise: recompute of every layer whatever needs no further matrix product.
        """
        self.name = base.name
        self.is_static = is_static(base)
        self.base = base
        self.selected = selected
        self.is_pointwise = is_pointwise

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Recompute if a selected sub-module saved or made it."""
        selected = self.selected.get(slot.layer, frozenset())
        is_selected = slot.path in selected or situation.producer in selected
        if not (is_selected or self.is_pointwise):
            return self.base.decide(slot, situation)
        otherwise = would_decide(self.base, slot, situation)
        return otherwise if isinstance(otherwise, Recompute) else Recompute(otherwise)

    def for_forward(self) -> RecomputeSelected:
        """Return the same over what the base policy makes for a forward."""
        base = for_forward(self.base)
        if base is self.base:
            return self
        return RecomputeSelected(base, self.selected, is_pointwise=self.is_pointwise)

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Return the selected sub-modules of the layer."""
        selected = self.selected.get(run.layer, frozenset())
        return selected if selected or self.is_pointwise else None


class KeepLastLayers:
    """Keep what the last layers of each forward save, since backward begins with it.

    Of a layer that runs several times in a forward, the last run alone is kept.
    """

    def __init__(self, base: Policy, first_kept: int) -> None:
        """Keep layers from index *first_kept* on; *base* decides on those before."""
        self.name = base.name
        self.is_static = is_static(base)
        self.base = base
        self.first_kept = first_kept

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep the last layers' slots."""
        if situation.is_last_run and slot.layer_index >= self.first_kept:
            return _KEEP_LAST
        return self.base.decide(slot, situation)

    def for_forward(self) -> KeepLastLayers:
        """Return the same over what the base policy makes for a forward."""
        base = for_forward(self.base)
        return self if base is self.base else KeepLastLayers(base, self.first_kept)

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Ask the base policy, if it is one that recomputes, about the layers before."""
        is_kept = run.is_last_run and run.layer_index >= self.first_kept
        return None if is_kept else products_to_replay(self.base, run)


class KeepEverything:
    """Leave all to autograd: no hook of ours is on, and nothing is counted."""

    is_static = True
    rests = True
    """The engine has nothing to do; see :func:`rests`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep."""
        return _KEEP_OFF


def rests(policy: Policy) -> bool:
    """Say whether *policy* keeps everything, so that layers need not be entered at all."""
    return bool(getattr(policy, "rests", False))


class OffloadNothing:
    """Keep everything: bytes are counted, and other parts of hf_pyao work alone."""

    name = "off"
    is_static = True

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep."""
        return _KEEP_OFF


def products_to_replay(policy: Policy, run: LayerRun) -> frozenset[str] | None:
    """Ask *policy*, if it is a :class:`RecomputingPolicy`; None if it is not."""
    # No isinstance: to check a protocol takes as long as to pack ten tensors.
    ask = getattr(policy, "products_to_replay", None)
    found: frozenset[str] | None = None if ask is None else ask(run)
    return found


def is_static(policy: Policy) -> bool:
    """Say whether what *policy* decides follows from what it is asked alone."""
    return bool(getattr(policy, "is_static", False))


def would_decide(policy: Policy, slot: Slot, situation: Situation) -> Decision:
    """Return what *policy* decides if nothing else becomes of *slot*.

    A policy that counts what leaves has a method ``would_decide``, which counts nothing.
    """
    ask = getattr(policy, "would_decide", policy.decide)
    decision: Decision = ask(slot, situation)
    return decision


def for_forward(policy: Policy) -> Policy:
    """Return what decides in one forward: *policy*, or what it makes for each (``for_forward()``).

    So a policy that counts as it goes has no state that forwards on several threads share.
    """
    make = getattr(policy, "for_forward", None)
    made: Policy = policy if make is None else make()
    return made
