"""Texts that the ranks of a training send each other, without any of them waiting.

Texts go through the store of torch's process group, and not through a collective. Collectives would
have to run in the same order on all ranks, between those of the gradients, and would wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hf_pyao.errors import warn
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)


class RankExchange:
    """One round in which each rank tells the others a text.

    Args:
        name: what it is about; rounds of one name are counted on each rank.
    """

    def __init__(self, name: str) -> None:
        self._store: Any = None
        own = process_rank()
        self.rank, self.num_ranks = own.rank, own.num_ranks
        self.number = 0
        """Which round of that name it is on this rank, from 1 on; 0 where there is one rank."""
        if self.num_ranks == 1:
            return
        try:
            self._store = torch.distributed.distributed_c10d._get_default_store()
            self.number = int(self._store.add(f"hf_pyao/{name}/{self.rank}", 1))
        except Exception as error:  # a store of another kind, or gone
            warn(
                logger, "ranks-not-told", "the ranks do not hear of each other's figures: %s", error
            )
            self._store, self.num_ranks = None, 1
            return
        self._prefix = f"hf_pyao/{name}/{self.number}"

    def tell(self, text: str) -> None:
        """Tell the other ranks."""
        if self._store is None:
            return
        try:
            self._store.set(self._key(self.rank), text)
        except Exception as error:  # the rank that holds it has ended
            warn(
                logger,
                "ranks-not-told",
                "the other ranks do not hear of this one's figures: %s",
                error,
            )
            self._store = None

    def heard(self, *, wait_s: float = 0.0) -> Sequence[str] | None:
        """Return what all ranks told, in order; None if some have not yet.

        Args:
            wait_s: how long to wait for them.
        """
        return self._heard(range(self.num_ranks), wait_s)

    def heard_from(self, rank: int, *, wait_s: float = 0.0) -> str | None:
        """Return what one rank told; None if it has not yet; *wait_s* as for :meth:`heard`."""
        found = self._heard([rank], wait_s)
        return None if found is None else found[0]

    def _heard(self, ranks: Sequence[int], wait_s: float) -> list[str] | None:
        if self._store is None:
            return None
        keys = [self._key(rank) for rank in ranks]
        try:
            if wait_s:
                self._store.wait(keys, timedelta(seconds=wait_s))
            elif not self._store.check(keys):
                return None
            return [self._store.get(key).decode("utf-8") for key in keys]
        except Exception as error:  # a rank that ended takes the store with it
            logger.debug("nothing was heard from the other ranks: %s", error)
            return None

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


class RankNews(RankExchange):
    """Texts that each rank may tell anew at any time; *name* as for :class:`RankExchange`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._num_heard = 0

    def tell(self, text: str) -> None:
        """Tell the other ranks, in place of what was told before."""
        super().tell(text)
        self._count(1)

    def news(self) -> Sequence[str]:
        """Return the newest text of each rank that told one; none if there is nothing new.

        It asks the store once, as long as nothing is new.
        """
        num_told = self._count(0)
        if num_told == self._num_heard:
            return ()
        self._num_heard = num_told
        found = (self.heard_from(rank) for rank in range(self.num_ranks))
        return [text for text in found if text is not None]

    def _count(self, num_more: int) -> int:
        if self._store is None:
            return self._num_heard
        try:
            return int(self._store.add(f"{self._prefix}/told", num_more))
        except Exception as error:  # a rank that ended takes the store with it
            logger.debug("the store does not count: %s", error)
            return self._num_heard
