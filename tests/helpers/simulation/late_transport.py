"""The slowest link there could be: for memory peaks that hold on every link."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from hf_pyao.engine.transfer.transport import BlockingTransport, CopyOptions, DoneTicket


@dataclass(eq=False)
class LateTicket(DoneTicket):
    """A copy that counts as done once something has waited for it, or for a later one."""


class LateTransport(BlockingTransport):
    """Copies that are done only when something waits for them.

    What the engine allows to be in flight is then always in flight, so that the peak is an upper
    bound for every link. Takes tensors of a CPU that stand for a device's, fake ones too. Bytes are
    copied at once. Times are this machine's, and say nothing.
    """

    name = "late"

    def __init__(self) -> None:
        super().__init__()
        self._orders = itertools.count()
        self._done: dict[object, int] = {"offload": -1, "reload": -1}

    def wait(self, ticket: DoneTicket) -> None:
        """Finish the copy, and those before it in its queue."""
        self._done[ticket.queue] = max(self._done[ticket.queue], ticket.order)

    def is_done(self, ticket: DoneTicket) -> bool:
        """Say whether something has waited for the copy."""
        return ticket.order <= self._done[ticket.queue]

    def _copy(
        self, direction: str, src: torch.Tensor, dst: torch.Tensor, options: CopyOptions
    ) -> LateTicket:
        super()._copy(direction, src, dst, {})
        return LateTicket(src.nbytes, queue=direction, order=next(self._orders))
