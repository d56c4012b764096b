"""The streams that compute runs on: whose memory is whose, and who waits for whom before it goes.

See [Note: Stream order] in ``transport``. With one compute stream nothing here does anything; on a
CPU, which has none, a storage has no :class:`Home` at all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

WITHOUT_STREAMS = ("cpu", "meta")
"""Types of devices that have no streams."""

_num_holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda key: 1)
"""How many tensors and storage objects hold a storage; where torch does not tell: one."""


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that compute on *device* is queued on now; None on a CPU."""
    if device.type in WITHOUT_STREAMS:
        return None
    return torch.accelerator.current_stream(device.index)  # an index is found faster than a device


class ComputeStreams:
    """The compute streams of the micro-batches under way, as they were seen.

    A stream is seen once something that a layer saves was moved, or asked for, on it.
    """

    def __init__(self) -> None:
        self.are_several = False
        """True once two streams of one device were seen."""
        self._seen: tuple[torch.Stream, ...] = ()
        self._lingering: list[weakref.ref[Lingering]] = []
        self._lock = threading.RLock()  # forwards may run on several threads

    def home_here(self, device: torch.device) -> Home | None:
        """Return a home on the stream that compute on *device* runs on now; None on a CPU."""
        stream = current_stream(device)
        return None if stream is None else self.home_on(stream)

    def home_on(self, stream: torch.Stream) -> Home:
        """Return a home on *stream*."""
        self.note(stream)
        return Home(self, stream)

    def note(self, stream: torch.Stream) -> None:
        """Record a stream that compute runs on."""
        seen = self._seen
        if not seen:
            self._seen = (stream,)
        elif stream != seen[0] and stream not in seen:
            self._seen = (*seen, stream)
            self.are_several |= any(stream.device == other.device for other in seen)

    def beside(self, stream: torch.Stream) -> list[torch.Stream]:
        """Return the other streams seen on the device of *stream*."""
        return [other for other in self._seen if other != stream and other.device == stream.device]

    def let_go(self, home: Home | None, storage: torch.UntypedStorage) -> Lingering | None:
        """Let go of *storage*, which no copy reads; return what lingers, to be held by the caller.

        Autograd would have held it until backward. With several compute streams it lingers until no
        one else holds it: whoever does may yet queue readers of which the stream that it was
        allocated on knows nothing.

        Args:
            home: that of the bytes that stand for it.
            storage: let go as soon as nothing but this call, or what it returns, holds it.
        """
        if not self.are_several:
            return None
        if is_held_elsewhere(storage):
            lingering = Lingering(home, storage)
            with self._lock:
                self._lingering.append(weakref.ref(lingering))
            return lingering
        if home is not None:
            home.await_everywhere()
        return None

    @property
    def has_lingering(self) -> bool:
        """True while something lingers."""
        return bool(self._lingering)

    def release_lingering(self) -> None:
        """Let go of what lingers and no one else holds any more."""
        if not self._lingering:
            return
        with self._lock:
            refs, self._lingering = self._lingering, []
            for ref in refs:
                lingering = ref()
                if lingering is not None and not lingering.try_to_let_go():
                    self._lingering.append(ref)

    def forget(self) -> None:
        """Forget the streams seen so far: the next micro-batch may run on others."""
        if not self._lingering:
            self._seen = ()
            self.are_several = False


class Home:
    """The compute stream that the memory of one storage belongs to, and those that visit it.

    All that is made on the device for a storage is allocated and written on its home. Visitors
    wait for the home before they read, and the home for them before memory is let go.
    """

    __slots__ = ("_streams", "_visitors", "stream")

    def __init__(self, streams: ComputeStreams, stream: torch.Stream) -> None:
        self.stream = stream
        self._streams = streams
        self._visitors: tuple[torch.Stream, ...] = ()

    def visitor(self) -> torch.Stream | None:
        """Return the current stream if it is not the home; else None."""
        stream = torch.accelerator.current_stream(self.stream.device_index)
        return None if stream == self.stream else stream

    def note_visitor(self) -> None:
        """Record that the current stream reads the storage, too."""
        stream = self.visitor()
        if stream is not None and stream not in self._visitors:
            self._streams.note(stream)
            self._visitors = (*self._visitors, stream)

    def receive(self, visitor: torch.Stream) -> None:
        """Let *visitor* read what the home has queued so far."""
        visitor.wait_stream(self.stream)
        self._streams.note(visitor)
        if visitor not in self._visitors:
            self._visitors = (*self._visitors, visitor)

    def meet_visitors(self) -> None:
        """Order the home behind what visitors have queued: it reads what they may have written."""
        for visitor in self._visitors:
            self.stream.wait_stream(visitor)

    def await_visitors(self) -> None:
        """Order the home behind what visitors have queued: memory of the home's is let go."""
        self.meet_visitors()
        self._visitors = ()

    def await_everywhere(self) -> None:
        """Order every stream behind the home and its visitors: memory is let go, of whose no one
        knows."""
        self.await_visitors()
        others = self._streams.beside(self.stream)
        if others:
            event = self.stream.record_event()
            for other in others:
                other.wait_event(event)


class Lingering:
    """A storage that was let go while others held it, with several compute streams."""

    __slots__ = ("__weakref__", "_home", "_storage")

    def __init__(self, home: Home | None, storage: torch.UntypedStorage) -> None:
        self._home = home
        self._storage: torch.UntypedStorage | None = storage

    @property
    def is_held(self) -> bool:
        """True until it was let go."""
        return self._storage is not None

    def try_to_let_go(self) -> bool:
        """Let go if no one else holds it; say whether it is gone."""
        storage = self._storage
        if storage is not None:
            if _num_holders(storage._cdata) > 1:
                return False
            if self._home is not None:
                self._home.await_everywhere()
            self._storage = None
        return True


def is_held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Say whether anything but *storage*, a Python object, holds the memory that it stands for."""
    return _num_holders(storage._cdata) > 1
