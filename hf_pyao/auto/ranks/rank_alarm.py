"""Ends all ranks when one of them cannot go on, instead of letting them wait until a timeout.

[Note: How the others hear of it]
The rank that fails writes the reason into the process group's store, waits until the others have
read it (or a few seconds), and aborts its process groups. Over gloo its peers' collectives fail at
once, since the connections close. Over NCCL a peer's collective would go on waiting. There a thread
of the peer, which looks into the store every two seconds, logs the reason and aborts that rank's
groups, which ends the wait. None of this is a collective, and none of it runs on the training
thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hf_pyao.errors import warn
from hf_pyao.ranks import process_rank

logger = logging.getLogger(__name__)

_KEY = "hf_pyao/out_of_memory"
_POLL_S = 2.0
_WAIT_FOR_PEERS_S = 10.0
_GRACE_S = 5.0
"""How long a collective has to fail by itself, before the watcher ends it."""


class RankAlarm:
    """Tells the other ranks that this one ends, and hears the same of them.

    Make it where several processes train; :meth:`stop` ends its thread, and so does its own end.
    """

    def __init__(self) -> None:
        self._heard = _Heard()
        self._stop = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(self._heard, self._stop), name="hf_pyao rank alarm", daemon=True
        )
        # Also before the interpreter ends: a thread must not be inside of the store by then.
        self._finalizer = weakref.finalize(self, _end, thread, self._stop)
        thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._finalizer()

    def raise_it(self, message: str) -> None:
        """Tell the others that this rank ends, wait until they know, and abort its groups."""
        self.stop()  # it would hear itself
        store = _store()
        if store is None:
            return
        rank = process_rank().rank
        try:
            store.set(_KEY, f"rank {rank}: {message}")
            others = [key for peer, key in enumerate(_heard_keys()) if peer != rank]
            store.wait(others, timedelta(seconds=_WAIT_FOR_PEERS_S))
        except Exception as error:  # some rank has ended already
            logger.debug("not all ranks have heard of the end: %s", error)
        _abort_groups()

    def heard(self) -> str:
        """Return what another rank ended with; empty if none is known to have ended.

        Asked after an error, which that rank's end may have caused: it waits for a moment.
        """
        self._heard.event.wait(2 * _POLL_S)
        return self._heard.message


class _Heard:
    """What the watcher has heard."""

    def __init__(self) -> None:
        self.message = ""
        self.event = threading.Event()


def _watch(heard: _Heard, stop: threading.Event) -> None:
    """Look into the store until something is there, or *stop* is set."""
    while not stop.wait(_POLL_S):
        store = _store()
        if store is None:
            return
        try:
            if not store.check([_KEY]):
                continue
            message = store.get(_KEY).decode("utf-8")
            rank = process_rank().rank
            if message.startswith(f"rank {rank}:"):
                return  # this one ends, as another of its models has told
            heard.message = message
            store.set(_heard_keys()[rank], "")
        except Exception as error:  # the rank that held the store has ended
            logger.debug("the other ranks can no longer be heard: %s", error)
            return
        warn(
            logger,
            "another-rank-ended",
            "another rank has ended, and so does this one. %s",
            heard.message,
            level=logging.ERROR,
        )
        heard.event.set()
        if not stop.wait(_GRACE_S):
            _abort_groups()
        return


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_POLL_S)


def _store() -> Any:
    """Return the store of the default process group; None where there is none any more."""
    if process_rank().num_ranks == 1:
        return None
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except Exception:
        return None


def _heard_keys() -> Sequence[str]:
    return [f"{_KEY}/heard/{rank}" for rank in range(process_rank().num_ranks)]


def _abort_groups() -> None:
    """End what waits in this rank's process groups, and their connections."""
    with contextlib.suppress(Exception):  # a backend that cannot
        torch.distributed.distributed_c10d._abort_process_group()
