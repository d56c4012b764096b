"""Policies: which saved tensors leave the device. Decisions are values that carry their reason."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.errors import ConfigError

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


class Policy(abc.ABC):
    """Decides, for each distinct saved storage of a layer call, what becomes of it.

    It is asked inside the pack hook for all that autograd saves in a layer but parameters and
    buffers, and for anchors; of what stays in any case (``situation.stays``) it only hears. It must
    be cheap and must not touch data.

    A subclass gives :attr:`name` and :meth:`decide`. The other attributes and methods have defaults
    that are right for a policy that decides on each slot by itself.
    """

    name: str
    """What reports call it."""
    is_static: bool = False
    """True if decisions follow from the arguments of :meth:`decide` alone: it is then asked once
    for each slot, not in every call."""
    rests: bool = False
    """True if it keeps everything and counts nothing, so that layers need not be entered at all."""
    may_lose: bool = False
    """True if it asks for codecs that are not exact."""
    may_recompute: bool = False
    """True if it may decide to recompute; :meth:`products_to_replay` is then asked."""

    @abc.abstractmethod
    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Return what becomes of *slot*."""

    def would_decide(self, slot: Slot, situation: Situation) -> Decision:
        """Return what :meth:`decide` would return, and count nothing.

        A policy whose decisions change what it decides next overrides this.
        """
        return self.decide(slot, situation)

    def for_forward(self) -> Policy:
        """Return what decides in one forward.

        A policy that counts as it goes returns a new one for each forward.
        """
        return self

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Return the sub-modules whose matrix products and attention may run again.

        None if nothing of this run of the layer is recomputed: its operations are not traced then.
        """
        return None

    def runs_again(self, layer_index: int) -> bool:
        """Say whether a layer runs again as a whole, where layers do (``checkpoint_every``)."""
        return True

    @property
    def innermost(self) -> Policy:
        """The policy that decides in the end, without those that are wrapped around it."""
        return self


def as_policy(given: Any) -> Policy:
    """Return *given*, if it is a :class:`Policy`.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(given, Policy):
        raise ConfigError(
            f"policy is {given!r}; expected a subclass of hf_pyao.engine.runtime.policy.Policy, "
            "which gives `name` and `decide(slot, situation)`. A named one is made by "
            "hf_pyao.plan.policies.by_name.make_policy(config).",
            key="wrong-argument",
        )
    return given


class OffloadAll(Policy):
    """Offload everything that is large enough to be worth a copy."""

    is_static = True

    def __init__(self, min_bytes: int, name: str = "all") -> None:
        self.min_bytes = min_bytes
        self.name = name

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Offload unless the storage is smaller than ``min_bytes``."""
        return _OFFLOAD if slot.nbytes >= self.min_bytes else _KEEP_SMALL


class OffloadModules(Policy):
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


class WrappedPolicy(Policy):
    """A policy around another one, which decides on whatever this one does not."""

    def __init__(self, base: Policy) -> None:
        self.base = base
        self.name = base.name
        self.is_static = base.is_static
        self.may_lose = base.may_lose
        self.may_recompute = base.may_recompute

    def for_forward(self) -> WrappedPolicy:
        """Return the same over what the base policy makes for a forward."""
        base = self.base.for_forward()
        if base is self.base:
            return self
        other = copy.copy(self)
        other.base = base
        return other

    def runs_again(self, layer_index: int) -> bool:
        """Ask the base policy."""
        return self.base.runs_again(layer_index)

    @property
    def innermost(self) -> Policy:
        """What the base policy says."""
        return self.base.innermost


class RecomputeSelected(WrappedPolicy):
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
        super().__init__(base)
        self.may_recompute = True
        self.selected = selected
        self.is_pointwise = is_pointwise

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Recompute if a selected sub-module saved or made it."""
        selected = self.selected.get(slot.layer, frozenset())
        is_selected = slot.path in selected or situation.producer in selected
        if not (is_selected or self.is_pointwise):
            return self.base.decide(slot, situation)
        otherwise = self.base.would_decide(slot, situation)
        return otherwise if isinstance(otherwise, Recompute) else Recompute(otherwise)

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Return the selected sub-modules of the layer."""
        selected = self.selected.get(run.layer, frozenset())
        return selected if selected or self.is_pointwise else None


class KeepLastLayers(WrappedPolicy):
    """Keep what the last layers of each forward save, since backward begins with it.

    Of a layer that runs several times in a forward, the last run alone is kept.
    """

    def __init__(self, base: Policy, first_kept: int) -> None:
        """Keep layers from index *first_kept* on; *base* decides on those before."""
        super().__init__(base)
        self.first_kept = first_kept

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep the last layers' slots."""
        if situation.is_last_run and slot.layer_index >= self.first_kept:
            return _KEEP_LAST
        return self.base.decide(slot, situation)

    def would_decide(self, slot: Slot, situation: Situation) -> Decision:
        """Say the same, and count nothing."""
        if situation.is_last_run and slot.layer_index >= self.first_kept:
            return _KEEP_LAST
        return self.base.would_decide(slot, situation)

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        """Ask the base policy about the layers before."""
        is_kept = run.is_last_run and run.layer_index >= self.first_kept
        return None if is_kept else self.base.products_to_replay(run)


class KeepEverything(Policy):
    """Leave all to autograd: no hook of ours is on, and nothing is counted."""

    is_static = True
    rests = True

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep."""
        return _KEEP_OFF


class OffloadNothing(Policy):
    """Keep everything: bytes are counted, and other parts of hf_pyao work alone."""

    name = "off"
    is_static = True

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Keep."""
        return _KEEP_OFF
