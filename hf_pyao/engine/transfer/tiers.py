"""The tiers of a link: where bytes go that leave the device, in the order in which they are filled.

A tier is a store, and the transport that copies between the store and the device. The mover asks
the first tier for room, then the next. A tensor that finds no room in any tier stays on the device.
The place of moved bytes is a tier and a phase (``mover``). Code that asks for the bytes sees
the phase alone, and never the tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.quantities import GIB


class Tier(NamedTuple):
    """A store, and how bytes get there and back."""

    store: Store
    transport: Transport
    """Copies between the device and the store's buffers. Where it is not the link's own, its marks
    are on the same clock, and its tickets are such as ``span_of`` of the link's transport takes."""


class Tiers:
    """The tiers of a link, the nearest first, and what they have together."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = tuple(tiers)
        self.transports: tuple[Transport, ...] = tuple(
            {id(tier.transport): tier.transport for tier in self._tiers}.values()
        )
        """The different transports, the link's own first."""

    def __iter__(self) -> Iterator[Tier]:
        """Yield the tiers, the nearest first."""
        return iter(self._tiers)

    @property
    def stores(self) -> tuple[Store, ...]:
        """Their stores, the nearest first."""
        return tuple(tier.store for tier in self._tiers)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that they may reserve."""
        return sum(store.capacity_bytes for store in self.stores)

    @property
    def used_bytes(self) -> int:
        """Bytes that buffers take now."""
        return sum(store.used_bytes for store in self.stores)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the host's memory that are reserved, in use or not."""
        return sum(store.pool_bytes for store in self.stores if store.is_host_memory)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are reserved and page-locked."""
        return sum(store.pool_bytes for store in self.stores if store.is_pinned)

    def has_room(self, nbytes: int) -> bool:
        """Say whether buffers of *nbytes* in all find room."""
        return nbytes <= sum(store.room() for store in self.stores)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Say whether *storage* is memory of one of the tiers, and hence not the device's."""
        return any(tier.store.owns(storage) for tier in self._tiers)

    def names(self) -> str:
        """Return ``pinned host memory``, or several names with ``then`` between them."""
        return ", then ".join(
            f"pinned {store.name}" if store.is_pinned else store.name for store in self.stores
        )

    def limits(self) -> str:
        """Return ``at most 3.0 GiB (how that came about)``, for each of the tiers."""
        return ", then ".join(_limit(store) for store in self.stores)


def _limit(store: Store) -> str:
    origin = f" ({store.limit_origin})" if store.limit_origin else ""
    return f"at most {store.capacity_bytes / GIB:.1f} GiB{origin}"
