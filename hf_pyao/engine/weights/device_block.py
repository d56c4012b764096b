"""A block on the device: one storage for life, emptied after use and filled again.

[Note: Refilled storages]
- Each block has a storage of its own. It is emptied (``resize_(0)``) when others take its place,
  and gets its bytes again before it is used: all views of it are right again then, whoever holds
  them. This is how FSDP2 keeps its gathered parameters.
- Memory is allocated and let go on the stream that computes. A fill starts behind all that this
  stream has queued so far, hence behind the readers of whoever had the memory before. Compute waits
  for the fill by an event. The host waits for nothing, and nothing is copied back.
- A block on a disk comes span by span, as :class:`~hf_pyao.engine.weights.read_ahead.ReadAhead` has
  read them; who waits for the fill first waits until all copies are queued.
- Before a storage is emptied, it is counted who holds it. Autograd's graph does not: the engine's
  hooks save a block and a layout. The nodes of quantised products do, and a hook fills the storage
  before they run (:class:`HeldByGraph`). Anyone else is left the memory with its bytes, and the
  block gets another storage: nobody ever reads emptied memory.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hf_pyao.engine.transfer.compute_streams import current_stream, num_holders, visitor_of
from hf_pyao.engine.transfer.layout import bytes_view
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.transport import LinkTimes, Transport
from hf_pyao.engine.weights.blocks import Block, Weight
from hf_pyao.engine.weights.device_weight import DeviceWeight
from hf_pyao.engine.weights.figures import UploadFigures
from hf_pyao.engine.weights.read_ahead import Arrival, ReadAhead

_T = TypeVar("_T")


class HeldByGraph:
    """Views of a block that a node of autograd's graph holds; a hook of that node.

    Args:
        number: how many.
        fill: has the block on the device.
    """

    def __init__(self, number: int, fill: Callable[[], object]) -> None:
        self.number = number
        self._fill = fill

    def __call__(self, *gradients: object) -> None:
        """Fill the storage: the node runs next."""
        self._fill()


class DeviceBlock:
    """The device's side of one block; see [Note: Refilled storages].

    Args:
        block: its weights on the host.
        link: has the transport.
        device: where the storage is.
        counts: the meter of the uploads.
        times: what the uploads took, and compute's waits for them.
        read_ahead: reads blocks that are on a disk; None: none are.
    """

    def __init__(
        self,
        block: Block,
        link: LinkContext,
        device: torch.device,
        counts: UploadFigures,
        times: LinkTimes,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.block = block
        self.device = device
        self.is_here = False
        """True once compute is ordered behind the fill."""
        self._transport = link.transport
        self._counts = counts
        self._times = times
        self._read_ahead = read_ahead
        self._home: torch.Stream | None = None
        """The compute stream that the memory belongs to; None on a CPU."""
        self._visitors: set[torch.Stream] = set()
        """Other streams that read it."""
        self._tickets: list[object] = []
        self._arrival: Arrival | None = None
        """What is still to come from a disk; None once all copies are queued."""
        self._begin()
        end = weakref.finalize(self, _retire, self._transport, self._tickets, block, read_ahead)
        end.atexit = False

    def _begin(self) -> None:
        """Have an empty storage that nobody knows."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.storage = empty.untyped_storage()
        self._given: dict[Weight, DeviceWeight] = {}
        """What modules read now."""
        self._made: dict[object, tuple[Any, int]] = {}
        """What was made over this storage for good, and how many views of it that holds."""
        self._num_own = 1
        self._in_graphs: weakref.WeakSet[HeldByGraph] = weakref.WeakSet()

    @property
    def key(self) -> int:
        """By which the storage is known."""
        key: int = self.storage._cdata
        return key

    @property
    def is_full(self) -> bool:
        """True while the storage has memory."""
        return self.storage.nbytes() > 0

    # ---- filling -------------------------------------------------------------------------------

    def fill(self) -> None:
        """Queue the copy of the block from the host, or from its disk."""
        meant = self.block
        self._drop_fill()
        if not self.is_full:
            self._home = current_stream(self.device)
            self.storage.resize_(meant.nbytes)
        self._await_visitors()
        in_file = meant.masters.file_to_read()
        meant.note_content()
        if in_file is None:
            for start, on_host in meant.pieces():
                self._copy(None, start, on_host)
            return
        assert self._read_ahead is not None
        with self._at_home():
            mark = self._transport.mark(self.device)
        spans = meant.spans(self._read_ahead.piece_bytes)
        copy = functools.partial(self._copy, mark)
        self._arrival = self._read_ahead.begin(meant.index, in_file, spans, copy)

    def _copy(self, behind: object, start: int, on_host: torch.Tensor) -> object:
        """Queue the copy of bytes to byte *start* of the storage on; return its ticket.

        Args:
            behind: where compute was when the fill began; None: where it is now.
            start: first byte in the storage.
            on_host: what is copied.
        """
        target = bytes_view(self.storage, self.device, start, start + on_host.numel())
        options: dict[str, Any] = {} if behind is None else {"behind": behind}
        try:
            with self._at_home():
                ticket: object = self._transport.reload(
                    on_host,
                    target,
                    label=f"weights of {self.block.layer!r}",
                    times=self._times,
                    **options,
                )
                self._tickets.append(ticket)
        except BaseException:
            self._transport.retire_all()  # an interrupt: it may be queued, and no one knows
            raise
        self._counts.uploaded_bytes += on_host.numel()
        return ticket

    def await_fill(self) -> None:
        """Order compute on the current stream behind the fill.

        Raises:
            DiskError: the block is on a disk, and cannot be read; nothing is left under way then.
        """
        if self._arrival is not None:
            assert self._read_ahead is not None
            try:
                self._read_ahead.finish(self._arrival)
            except Exception:
                self._drop_fill()
                raise
            self._arrival = None
        for ticket in self._tickets:
            self._transport.wait(ticket)
        for weight, tensor in self.block.strays():
            self.plain(weight).copy_(tensor.detach())
        self.is_here = True

    def _drop_fill(self) -> None:
        """Let go of a fill that no one has waited for."""
        if self._arrival is not None:
            assert self._read_ahead is not None
            self._read_ahead.cancel(self._arrival)
            self._arrival = None
        if not self.is_here:
            for ticket in self._tickets:
                self._transport.retire(ticket)
        self._tickets.clear()
        self.is_here = False

    def empty(self) -> bool:
        """Let go of the memory; False if it is left to someone who still holds a view of it."""
        self._drop_fill()
        self._await_visitors()
        if self.num_holders > sum(each.number for each in self._in_graphs):
            self.leave()
            return False
        with self._at_home():
            self.storage.resize_(0)
        return True

    def leave(self) -> None:
        """Leave the memory to those who hold a view of it: the block gets another storage."""
        self._drop_fill()
        self._begin()

    # ---- readers -------------------------------------------------------------------------------

    def weight(self, weight: Weight) -> DeviceWeight:
        """Return *weight* as modules read it, until :meth:`take_back`."""
        given = self._given.get(weight)
        if given is None:
            given = self._given[weight] = DeviceWeight.of(weight, self.storage, self.device)
        return given

    def plain(self, weight: Weight) -> torch.Tensor:
        """Return a plain view of *weight*. The storage has memory meanwhile."""
        return weight.view_of(self.storage, self.device)

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """Return what *make* makes of the storage, the first time; views in it are our own."""
        if key not in self._made:
            before = num_holders(self.storage)
            made = make()
            number = num_holders(self.storage) - before
            self._num_own += number
            self._made[key] = made, number
        found: _T = self._made[key][0]
        return found

    def forget(self, key: object) -> None:
        """Forget what :meth:`once` has made, which holds no views any more."""
        _, number = self._made.pop(key)
        self._num_own -= number

    def take_back(self) -> str | None:
        """Forget what modules were given; return the name of a weight that was changed there."""
        given, self._given = self._given, {}
        return next((each.weight.name for each in given.values() if each.was_written()), None)

    @property
    def num_holders(self) -> int:
        """How many tensors hold the storage, beside those that modules read."""
        return num_holders(self.storage) - self._num_own

    def note_graph(self, held: HeldByGraph) -> None:
        """Note that a node of autograd's graph holds views, for as long as *held* lives."""
        self._in_graphs.add(held)

    def meet(self) -> None:
        """Let the current stream read the storage, if the memory belongs to another stream."""
        visitor = visitor_of(self._home)
        if visitor is not None and self._home is not None:
            visitor.wait_stream(self._home)
            self._visitors.add(visitor)

    @property
    def is_at_home(self) -> bool:
        """True if the memory belongs to the current stream."""
        return visitor_of(self._home) is None

    def _await_visitors(self) -> None:
        """Order the stream that the memory belongs to behind the others that read it."""
        while self._visitors:
            visitor = self._visitors.pop()
            if self._home is not None:
                self._home.wait_stream(visitor)

    def _at_home(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._home is None else self._home


def _retire(
    transport: Transport, tickets: list[object], block: Block, read_ahead: ReadAhead | None
) -> None:
    """Let fills end before the memory goes that they read and write.

    *block* and *read_ahead* keep the host's side until then.
    """
    if read_ahead is not None:
        read_ahead.release()
    for ticket in tickets:
        transport.retire(ticket)
        while not transport.is_done(ticket):
            time.sleep(1e-4)
