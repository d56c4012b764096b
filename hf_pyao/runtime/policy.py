"""Policies: which saved tensors leave the device. Decisions are values that carry their reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from hf_pyao.codecs import Codec
from hf_pyao.config import POLICY_NAMES, PyAOConfig
from hf_pyao.errors import ConfigError, unknown_name

BELOW_MIN_BYTES = "below min_bytes"
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


@dataclass(slots=True)
class Candidate:
    """One distinct saved storage, as a policy sees it."""

    layer: str
    """Qualified name of the layer."""
    layer_index: int
    """Position of the layer in forward order."""
    path: str
    """Sub-module of the layer that saved it first; empty for the layer itself."""
    ordinal: int
    """How many distinct storages that sub-module had saved before it in this layer call."""
    nbytes: int
    """Bytes that autograd would keep alive for it."""
    dtype: torch.dtype
    producer: str | None = None
    """Sub-module that made it, where the layer is traced; None where it is not, or if it was made
    outside of the layer."""

    @property
    def slot(self) -> str:
        """Name shared by structurally identical layers, such as ``self_attn.q_proj:0``."""
        return f"{self.path}:{self.ordinal}"


Selection = Mapping[str, frozenset[str]]
"""Layer name -> paths of selected sub-modules in it; ``""`` is the layer itself."""


@runtime_checkable
class Policy(Protocol):
    """Decides, for each distinct saved storage of a layer call, what becomes of it.

    Called inside the pack hook for tensors that can be moved: plain, dense, on the device, neither
    a parameter nor shared by layers nor of a last layer. It must be cheap and must not touch data.
    """

    name: str

    def decide(self, candidate: Candidate) -> Decision:
        """Return what becomes of *candidate*."""
        ...


class OffloadAll:
    """Offload everything that is large enough to be worth a copy."""

    name = "all"

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes

    def decide(self, candidate: Candidate) -> Decision:
        """Offload unless the storage is smaller than ``min_bytes``."""
        return _OFFLOAD if candidate.nbytes >= self.min_bytes else _KEEP_SMALL


class OffloadModules:
    """Offload what the selected sub-modules saved first (Megatron-Core's ``offload_modules``)."""

    name = "modules"

    def __init__(self, min_bytes: int, selected: Selection) -> None:
        self.min_bytes = min_bytes
        self.selected = selected

    def decide(self, candidate: Candidate) -> Decision:
        """Offload if a selected sub-module saved it and it is not smaller than ``min_bytes``."""
        if candidate.path not in self.selected.get(candidate.layer, ()):
            return _KEEP_NOT_SELECTED
        return _OFFLOAD if candidate.nbytes >= self.min_bytes else _KEEP_SMALL


@runtime_checkable
class RecomputingPolicy(Policy, Protocol):
    """A policy that may decide to recompute."""

    def products_to_replay(self, layer: str) -> frozenset[str] | None:
        """Return the sub-modules of *layer* whose matrix products and attention may run again.

        None if nothing of *layer* is recomputed: its operations are not traced then.
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
        self.base = base
        self.selected = selected
        self.is_pointwise = is_pointwise

    def decide(self, candidate: Candidate) -> Decision:
        """Recompute if a selected sub-module saved or made it."""
        otherwise = self.base.decide(candidate)
        selected = self.selected.get(candidate.layer, frozenset())
        is_selected = candidate.path in selected or candidate.producer in selected
        if isinstance(otherwise, Recompute) or not (is_selected or self.is_pointwise):
            return otherwise
        return Recompute(otherwise)

    def products_to_replay(self, layer: str) -> frozenset[str] | None:
        """Return the selected sub-modules of *layer*."""
        selected = self.selected.get(layer, frozenset())
        return selected if selected or self.is_pointwise else None


class OffloadNothing:
    """Keep everything: bytes are counted, and other parts of hf_pyao work alone."""

    name = "off"

    def decide(self, candidate: Candidate) -> Decision:
        """Keep."""
        return _KEEP_OFF


POLICIES: dict[str, Callable[[PyAOConfig, Selection], Policy]] = {
    "all": lambda config, selected: OffloadAll(int(config.min_bytes)),
    "modules": lambda config, selected: OffloadModules(int(config.min_bytes), selected),
    "off": lambda config, selected: OffloadNothing(),
}


def make_policy(config: PyAOConfig, selected: Selection | None = None) -> Policy:
    """Return the policy that *config* names.

    Args:
        config: names the policy or holds an instance.
        selected: the sub-modules that ``config.modules`` stands for in this model.

    Raises:
        ConfigError: the name is unknown, or the object is no policy.
    """
    if isinstance(config.policy, str):
        if config.policy not in POLICIES:
            raise unknown_name("policy", config.policy, POLICIES)
        return POLICIES[config.policy](config, selected or {})
    if not isinstance(config.policy, Policy):
        raise ConfigError(
            f"policy is {config.policy!r}; expected one of {list(POLICY_NAMES)} or an object with "
            "`name` and `decide(candidate)`."
        )
    return config.policy
