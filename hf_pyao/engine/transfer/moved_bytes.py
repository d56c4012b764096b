"""Where the bytes of one range of a storage are: on the device, in a tier, or on their way.

Ownership runs one way: a record that may still ask for the bytes holds :class:`MovedBytes`, and
that holds the buffers. The mover refers to it weakly, so a buffer lives exactly as long as
someone may ask for it. Only this file changes its attributes;
:class:`~hf_pyao.engine.transfer.mover.Mover` says when.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.stores import Buffer
from hf_pyao.engine.transfer.layout import PartPlace, TensorLayout, rows_view
from hf_pyao.engine.transfer.meter import Label, Meter
from hf_pyao.engine.transfer.tiers import Tier
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.errors import InternalError


class Phase(enum.IntEnum):
    """How far the bytes are on their way to a tier and back. Which tier it is, is told apart."""

    OFFLOADING = 0
    """The device copy is held: the copy to the tier is queued, or put off; compute is not ordered
    behind it yet."""
    AWAY = 1
    """Only the tier's buffer holds them: no device memory."""
    RELOADING = 2
    """A device buffer is allocated and the copy into it queued."""
    HERE = 3
    """Compute is ordered behind the reload and may read the device buffer."""
    RELEASED = 4
    """Buffers are given back; asking for the bytes is an error."""


OFFLOADING, AWAY, RELOADING, HERE, RELEASED = Phase
"""The same, for hot paths: to ask an enum for a member takes several times as long."""

_LEGAL = (
    (AWAY, RELEASED),
    (RELOADING, RELEASED),
    (HERE, AWAY, RELEASED),
    (AWAY, RELEASED),
    (),
)
"""The phases that may follow each phase, in the order of the enum."""


class Owner(Protocol):
    """Who takes the buffers back."""

    def release(self, moved: MovedBytes) -> None:
        """Take back what *moved* holds, from its destructor."""
        ...


class MovedBytes:
    """One byte range of a storage, which was moved or is to be.

    ``start`` is the byte offset of the range inside the original storage, a multiple of 64, so
    that rebuilt views keep their alignment: on a CPU alignment alone changes matrix products.
    """

    # What most of these still have when they go is left to the class: they are made in the hottest
    # path there is.
    codec: Codec | None = None
    """None where the bytes were moved as they are."""
    spec: Any = None
    parts: tuple[PartPlace, ...] = ()
    payload: tuple[torch.Tensor, ...] = ()
    """What is being copied to the host; empty once compute is ordered behind the copy."""
    tier: Tier | None = None
    """Where they go, or went; None until a tier has made room."""
    transport: Transport
    """Who copies them; set once a tier has made room."""
    host: Buffer | None = None
    """The tier's buffer."""
    host_view: torch.Tensor | None = None
    """The host buffer with the layout of the tensor, where that was copied as it is; else None, and
    bytes are copied."""
    buffer: torch.Tensor | None = None
    """Reloaded payload, on the device: laid out as ``host_view``, or uint8 and flat."""
    decoded: torch.UntypedStorage | None = None
    """Bytes ``start`` to ``start + nbytes`` of the original storage, on the device."""
    decoded_start = 0
    """Byte of the original storage that ``decoded`` begins with."""
    offload_ticket: Any = None
    reload_ticket: Any = None
    start = 0
    is_whole = True
    """True if the whole storage is in here."""
    phase: Phase = OFFLOADING
    home: torch.Stream | None = None
    """The compute stream that its memory belongs to; None on a CPU. See [Note: Stream order]."""
    late_codec: Codec | None = None
    """While the copy to the host is put off: how it will be written."""
    owner: Owner | None = None

    def __init__(
        self,
        owner: Owner,
        item: int,
        source: torch.Tensor,
        layout: TensorLayout,
        nbytes: int,
        label: Label,
        meter: Meter,
    ) -> None:
        """Stand for bytes that are where they were.

        Args:
            owner: takes the buffers back.
            item: its id in the link's schedule.
            source: a tensor on the storage that may be emptied.
            layout: that of *source*.
            nbytes: all bytes of the storage, unless :meth:`is_part_from` is called next.
            label: names it in messages.
            meter: counts what is moved.
        """
        self.item = item
        self.source = source
        self.layout = layout
        self.label = label
        self.meter = meter
        self.nbytes = self.device_bytes = nbytes
        """``device_bytes``: what the payload takes on the device when it is brought back."""
        self.owner = owner  # last: an interrupt may come before, and the destructor asks for it

    def is_part_from(self, start: int) -> None:
        """Record that this is a part of the storage, from byte *start* on."""
        self.start = self.decoded_start = start
        self.is_whole = False

    @property
    def device(self) -> torch.device:
        """Where the bytes were."""
        return self.layout.blank.device

    @property
    def is_put_off(self) -> bool:
        """True while the copy to the host waits to be queued."""
        return self.late_codec is not None

    @property
    def is_near(self) -> bool:
        """True while the memory that the bytes leave is held: they can be read there."""
        return self.phase is OFFLOADING

    @property
    def is_away(self) -> bool:
        """True while the device has no copy, and none is on its way."""
        return self.phase is AWAY

    @property
    def is_here(self) -> bool:
        """True while compute may read the device copy that was brought back."""
        return self.phase is HERE

    @property
    def is_back(self) -> bool:
        """True while device memory is held for a copy that was brought back, or is on its way."""
        return self.phase is HERE or self.phase is RELOADING

    def to(self, phase: Phase) -> None:
        """Change to *phase*; only the transitions in the life of a buffer are legal.

        The hot paths check the usual transition themselves.
        """
        if phase not in _LEGAL[self.phase]:
            raise InternalError(
                f"{self.label}: illegal transition {self.phase.name} -> {phase.name}"
            )
        self.phase = phase

    # ---- to the host ---------------------------------------------------------------------------

    def put_off(self, codec: Codec, home: torch.Stream | None) -> None:
        """Record that the copy is queued later, written with *codec*."""
        self.payload = (self.source,)
        self.home = home
        self.late_codec = codec

    def no_longer_put_off(self) -> None:
        """Record that the copy is queued now, if it can be."""
        self.late_codec = None

    def rows_to_encode(self, codec: Codec) -> torch.Tensor | None:
        """View the bytes as *codec* reads them; None if they must stay as they are."""
        source = self.source
        end = self.start + self.nbytes
        rows = rows_view(source, source.untyped_storage(), self.start, end)
        if rows is None or not codec.accepts(source) or not codec.accepts(rows):
            return None
        return rows

    def encode_as(
        self,
        codec: Codec,
        spec: Any,
        payload: tuple[torch.Tensor, ...],
        parts: tuple[PartPlace, ...],
        nbytes: int,
        tier: Tier,
        host: Buffer,
    ) -> None:
        """Take *payload* in place of the source, which is let go; *nbytes* go to *host*."""
        self.tier = tier
        self.transport = tier.transport
        self.host = host
        self.payload = payload  # before the source goes: an interrupt may come
        self.codec, self.spec, self.parts = codec, spec, parts
        self.device_bytes = nbytes
        self.let_go_of_source()

    def is_leaving(
        self,
        tier: Tier,
        host: Buffer,
        host_view: torch.Tensor | None,
        source: torch.Tensor,
        ticket: Any,
    ) -> None:
        """Record that *source*, the bytes as they are, is copied to *host*, the tier's buffer."""
        self.tier = tier
        self.transport = tier.transport
        self.host = host
        if host_view is not None:
            self.host_view = host_view
        self.payload = (source,)
        self.offload_ticket = ticket
        self.home = ticket.compute

    def copy_queued(self, ticket: Any) -> None:
        """Record the (last) copy to the host."""
        self.offload_ticket = ticket
        self.home = ticket.compute

    def source_has_left(self) -> None:
        """Let go of the device copy: compute is ordered behind the copy to the host."""
        # First: an interrupt may come, and the bytes are looked for where it says.
        if self.phase is OFFLOADING:
            self.phase = AWAY
        else:
            self.to(AWAY)
        self.payload = ()
        if self.decoded is not None:
            self.decoded = None
        self.source.data = self.layout.blank  # as let_go_of_source does

    def let_go_of_source(self) -> None:
        """Let go of the source's memory; the tensor goes on sharing its version counter."""
        self.source.data = self.layout.blank

    # ---- back to the device --------------------------------------------------------------------

    def new_device_buffer(self) -> torch.Tensor:
        """Allocate what the payload is brought back to, on the current stream."""
        if self.host_view is None:
            return torch.empty(self.device_bytes, dtype=torch.uint8, device=self.device)
        layout = self.layout
        return layout.blank.new_empty_strided(layout.size, layout.stride)

    def reload_queued(self, buffer: torch.Tensor, ticket: Any) -> None:
        """Take the device buffer that the payload comes back to, and its copy."""
        self.buffer = buffer
        self.reload_ticket = ticket
        if self.phase is AWAY:
            self.phase = RELOADING
        else:
            self.to(RELOADING)

    def has_come(self) -> None:
        """Record that compute is ordered behind the reload."""
        if self.phase is RELOADING:
            self.phase = HERE
        else:
            self.to(HERE)

    def buffer_as_it_is(self) -> torch.Tensor | None:
        """Return the tensor that was brought back as it is, the first time; else None."""
        buffer = self.buffer
        if buffer is None or self.host_view is None:
            return None
        self.decoded = buffer.untyped_storage()
        self.buffer = None
        return buffer

    def decoded_as(self, storage: torch.UntypedStorage, start: int) -> None:
        """Take the bytes themselves; what was brought back of the payload may go."""
        self.decoded_start = start
        self.decoded = storage
        self.buffer = None

    def forget_decoded(self) -> None:
        """Let go of the bytes themselves; the payload is there yet."""
        self.decoded = None

    def drop_device_copy(self) -> None:
        """Forget the device copy; the host still has the bytes."""
        self.buffer = None
        self.decoded = None
        self.to(AWAY)

    # ---- the end -------------------------------------------------------------------------------

    def release(self) -> Buffer | None:
        """Let go of everything; return the tier's buffer, if there is one."""
        self.phase = RELEASED
        self.buffer = self.decoded = None
        self.payload = ()
        host, self.host = self.host, None
        return host

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Give the buffers back once no one can ask for them any more."""
        owner = self.owner  # None: an interrupt came as it was made
        if owner is not None and self.phase is not RELEASED and not _is_finalizing():
            owner.release(self)
