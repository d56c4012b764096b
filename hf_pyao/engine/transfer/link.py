"""What the engines of several models may share: one link, one host memory, one window."""

from __future__ import annotations

from collections.abc import Iterable

from hf_pyao.engine.stores import Store
from hf_pyao.engine.transfer.tiers import Tier, Tiers
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.transfer.window import OffloadWindow
from hf_pyao.errors import ConfigError


class LinkContext:
    """A transport, host memory, and how much may wait to leave at a time.

    Engines that share one, such as those of a pipeline's stages on one device, share what there is
    one of: the link, the host memory, and the bound on bytes in flight. What each of them moved,
    and how long its copies took, each counts for itself.

    Args:
        transport: copies bytes.
        store: where bytes go that leave the device, mostly a ``HostPool``.
        window_bytes: bound on bytes in flight in each direction; None is the paper's rule, to meet
            at the end of each layer (PyAO paper, section 4.2).
        further_tiers: where bytes go for which *store* has no room, the nearest first.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        window_bytes: int | None,
        further_tiers: Iterable[Tier] = (),
    ) -> None:
        self.transport = transport
        self.tiers = Tiers([Tier(store, transport), *further_tiers])
        self.window_bytes = window_bytes
        """What its models were configured with; what holds now is :attr:`limit_bytes`."""
        self.offloads = OffloadWindow(window_bytes)

    def join(self, user: object) -> None:
        """Note that *user*, an engine's mover, uses this link until it leaves, or is gone."""
        self.offloads.join(user)

    def leave(self, user: object) -> None:
        """End the use of *user*.

        After the last one the window is as configured again, and no thread of a disk is left.
        """
        self.offloads.leave(user)
        if not self.offloads.num_users:
            self.offloads.set_limit(self.window_bytes)
            for store in self.tiers.stores:
                store.rest()

    @property
    def is_shared(self) -> bool:
        """True while several engines use it."""
        return self.offloads.is_shared

    @property
    def limit_bytes(self) -> int | None:
        """The bound on bytes in flight that holds now; None: the end of each layer."""
        return self.offloads.limit_bytes

    def set_window(self, limit_bytes: int) -> None:
        """Bound the bytes in flight anew, from the next copy on.

        Raises:
            ConfigError: compute and copies meet at each layer's end, which cannot change later; or
                several engines share the link, so that none of them may change the window.
        """
        if self.window_bytes is None:
            raise ConfigError(
                "the window is 'layer'; a number of bytes cannot take its place.", key="shared-link"
            )
        if self.is_shared:
            raise ConfigError(
                f"the window cannot be set to {limit_bytes} bytes: "
                f"{self.offloads.num_users} models share the link. Detach the others first.",
                key="shared-link",
            )
        self.offloads.set_limit(limit_bytes)

    def has_room(self, nbytes: int) -> bool:
        """Say whether *nbytes* more find room where bytes go that leave the device."""
        return self.tiers.has_room(nbytes)

    def wait_for_every_copy(self) -> None:
        """Wait for each copy as it is queued, for all users of the link: the device is full."""
        self.offloads.set_limit(0)
