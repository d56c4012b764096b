"""Which tensors are casts of streamed weights, and of which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hf_pyao.engine.weights.blocks import Weight
    from hf_pyao.engine.weights.castable import Part

_NUM_BEFORE_SWEEP = 64
"""Casts that are known before those that are gone are looked for."""


@dataclass(frozen=True, slots=True)
class CastSource:
    """What a cast was made of, and how: all that it takes to make it again."""

    weight: Weight
    part: Part
    options: dict[str, Any] | None
    """Of ``_to_copy``; None: it is no cast, but a copy in the stored dtype."""


class KnownCasts:
    """Casts of weights by their storage, for as long as that lives.

    A storage is known by a weak reference, so that no other storage takes its place meanwhile.
    """

    def __init__(self) -> None:
        self._sources: dict[int, CastSource] = {}
        self._sweep_at = _NUM_BEFORE_SWEEP

    def note(self, cast: torch.Tensor, source: CastSource) -> None:
        """Remember that *cast* was just made from *source*."""
        if len(self._sources) >= self._sweep_at:
            self._sweep()
        storage = cast.untyped_storage()
        key: int = storage._cdata
        if key not in self._sources:
            storage._weak_ref()
        self._sources[key] = source

    def find(self, tensor: torch.Tensor) -> CastSource | None:
        """Return the source of the cast that *tensor* is a view of; None if it is of none."""
        return self._sources.get(tensor.untyped_storage()._cdata)

    def _sweep(self) -> None:
        for key in list(self._sources):
            if torch.UntypedStorage._expired(key):
                del self._sources[key]
                torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]
        self._sweep_at = max(_NUM_BEFORE_SWEEP, 2 * len(self._sources))

    def __del__(self) -> None:
        """Let go of the weak references on storages."""
        for key in self.__dict__.get("_sources", {}):
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]
