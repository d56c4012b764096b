"""The tape: layer calls of one micro-batch in forward order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from hf_pyao.metrics import MicroBatchStats
from hf_pyao.runtime.parameters import FrozenShapes
from hf_pyao.runtime.policy import Candidate
from hf_pyao.runtime.watching import SlotLabel

if TYPE_CHECKING:
    from hf_pyao.runtime.equal_casts import CastKey
    from hf_pyao.runtime.replay import Replay
    from hf_pyao.runtime.saved_tensor import SavedStorage
    from hf_pyao.runtime.tracing import Trace
    from hf_pyao.runtime.watching import WatchedStorage


class Slot(NamedTuple):
    """One distinct storage that a layer call saves."""

    label: SlotLabel
    candidate: Candidate
    """As a policy sees it."""


@dataclass(eq=False)
class Layer:
    """A module whose saved tensors are offloaded."""

    index: int
    fqn: str
    is_last: bool
    """True if its saved tensors stay: backward starts with it."""
    slots: list[Slot] = field(default_factory=list, repr=False)
    """What its newest call saved, in order: the next one is likely to save the same. Never changed
    in place, since calls on other threads may read it."""
    _labels: dict[str, SlotLabel] = field(default_factory=dict, repr=False)

    def label(self, path: str) -> SlotLabel:
        """Return the label of what a sub-module saves and what is no slot, such as parameters."""
        label = self._labels.get(path)
        if label is None:
            label = self._labels[path] = SlotLabel(self.fqn, path, -1)
        return label


@dataclass(eq=False)
class LayerCall:
    """One execution of a layer. Everything is keyed by it, never by the layer's name."""

    layer: Layer
    tape: Tape
    previous: LayerCall | None
    """The call before it in forward order; its tensors are the next that backward needs."""
    is_kept: bool
    """True if what it saves stays, since backward starts with it."""
    shared_keys: frozenset[int] = frozenset()
    """Storages among the layer's inputs that other layers get too (masks, rotary tables)."""
    frozen_shapes: FrozenShapes = field(default_factory=FrozenShapes)
    paths: list[str] = field(default_factory=lambda: [""])
    """Stack of the sub-modules that are running."""
    num_slots: int = 0
    """Distinct storages saved so far."""
    slots: list[Slot] = field(default_factory=list)
    """Those, and behind them what its layer's newest call saved besides."""
    owns_slots: bool = False
    """True if that list is its own, to be changed; else it is the layer's."""
    records: list[weakref.ref[SavedStorage]] = field(default_factory=list)
    put_off: list[weakref.ref[SavedStorage]] = field(default_factory=list)
    """Those whose copy waits for the end of the layer."""
    is_autocast: bool = False
    """True if it runs under autocast."""
    cast_input: torch.Tensor | None = None
    """Input of the projection that runs, which autocast casts for it."""
    casts: dict[CastKey, weakref.ref[SavedStorage]] = field(default_factory=dict)
    """Casts of such inputs that were moved, until its forward ends."""
    saved_shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Shapes of what was saved so far, kept where a lossy codec must know statistics by shape."""
    trace: Trace | None = None
    """What it computed so far, while it runs and if something of it is to be recomputed."""
    reason_not_traced: str | None = None
    anchor_keys: set[int] = field(default_factory=set)
    """Storages that autograd has not saved yet, stored to rebuild others from them."""
    replay: Replay | None = None
    """What of it was dropped, to be rebuilt in backward."""
    backward_task: int = -1
    """Id of the graph task in which its backward started last."""
    is_open: bool = True
    is_compiled: bool = False
    """True if compiled code runs around it, which must not trace what autograd calls back."""

    @property
    def fqn(self) -> str:
        """Qualified name of the layer."""
        return self.layer.fqn

    def next_slot(self, nbytes: int, dtype: torch.dtype) -> Slot:
        """Return the slot of a storage that was not saved before.

        Mostly it is the one that the layer's call before had at this place.
        """
        index = self.num_slots
        self.num_slots = index + 1
        if index < len(self.slots):
            slot = self.slots[index]
            candidate = slot.candidate
            if (
                candidate.path == self.paths[-1]
                and candidate.nbytes == nbytes
                and candidate.dtype is dtype
            ):
                return slot
        return self._new_slot(index, nbytes, dtype)

    def _new_slot(self, index: int, nbytes: int, dtype: torch.dtype) -> Slot:
        layer, path = self.layer, self.paths[-1]
        if not self.owns_slots:
            self.slots = self.slots.copy()
            self.owns_slots = True
        slots = self.slots
        if index < len(slots) and slots[index].label.path == path:
            label = slots[index].label
        else:
            del slots[index:]  # from here on it saves other things than the call before
            ordinal = sum(slot.label.path == path for slot in slots)
            label = SlotLabel(layer.fqn, path, ordinal)
        candidate = Candidate(layer.fqn, layer.index, path, label.ordinal, nbytes, dtype)
        slot = Slot(label, candidate)
        slots[index : index + 1] = [slot]
        return slot

    def settle(self) -> None:
        """Queue the copies that were put off to the end of the layer."""
        for ref in self.put_off:
            record = ref()
            if record is not None:
                record.settle()
        self.put_off.clear()

    def live_records(self) -> list[SavedStorage]:
        """Return the storages that some graph node may still ask for, in pack order."""
        return [record for ref in self.records if (record := ref()) is not None]


Note: TypeAlias = "SlotLabel | weakref.ref[WatchedStorage]"
"""What became of a storage: the label under which it was kept, or what stands for it elsewhere."""


class StorageTable:
    """What became of each storage seen on a tape, keyed by storage identity.

    A weak reference is held for every key, which keeps the address of the storage object (not its
    memory) from being used for another one: a bare data pointer would be recycled.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[Note]] = {}
        """Key of a storage (``_cdata``) -> what was noted for it."""

    def add(self, storage: torch.UntypedStorage) -> list[Note]:
        """Start notes for a new storage and return them."""
        entries: list[Note] = []
        self.entries[storage._weak_ref()] = entries  # type: ignore[index]
        return entries

    def clear(self) -> None:
        """Forget everything."""
        entries, self.entries = self.entries, {}
        for key in entries:
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        """Let go of the weak references."""
        if "entries" in vars(self):  # else an interrupt came as it was made
            self.clear()


class Tape:
    """The layer calls of one micro-batch: one or several forwards, and their backward.

    It opens at the first layer call after the previous tape closed, and closes when its backward
    has finished and no saved storage of it is left. Records hold their call, calls hold the tape,
    and the tape holds neither, so that an abandoned one disappears with its graph.
    """

    def __init__(self) -> None:
        self.stats = MicroBatchStats()
        self.table = StorageTable()
        self.calls: list[weakref.ref[LayerCall]] = []
        self.last_call: LayerCall | None = None
        self.has_run_backward = False
        self.is_failed = False
        self.is_announced = False
        """True if the module that runs the layers told of the newest forward."""
        self.is_published = False

    @property
    def accepts_forward(self) -> bool:
        """False once another forward would belong to the next micro-batch."""
        return not (self.has_run_backward or self.is_failed)

    def starts_over(self, layer: Layer) -> bool:
        """Say whether a call of *layer* begins a new forward, where no one else tells.

        Layers need not run in the order of their indices (a UNet's, or where attention and MLP are
        layers of their own), so that this is asked only where the stack is gone around.
        """
        if self.is_announced or self.last_call is None:
            return False
        return layer.index < self.last_call.layer.index

    def live_records(self) -> Iterator[SavedStorage]:
        """Yield the storages that some graph node may still ask for."""
        for ref in self.calls:
            if (call := ref()) is not None:
                yield from call.live_records()

    def live_replays(self) -> Iterator[Replay]:
        """Yield what was dropped in the layer calls that some graph node still belongs to."""
        for ref in self.calls:
            if (call := ref()) is not None and call.replay is not None:
                yield call.replay

    def has_live_records(self) -> bool:
        """Say whether some graph node may still ask for a storage of this tape."""
        if next(self.live_records(), None) is not None:
            return True
        return any(replay.live_slots() for replay in self.live_replays())

    def close(self) -> None:
        """Take no more calls. Storages that live on are released as their graph goes."""
        self.last_call = None
        self.table.clear()

    def open_call(self, layer: Layer, is_kept: bool) -> LayerCall:
        """Append a call of *layer*."""
        call = LayerCall(
            layer=layer, tape=self, previous=self.last_call, is_kept=is_kept, slots=layer.slots
        )
        self.calls.append(weakref.ref(call))
        self.last_call = call
        return call
