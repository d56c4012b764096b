"""The tape: the layer calls of one forward, until their backward is over.

A layer call, its layer and its tape each change their own state; others ask them to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_pyao.engine.runtime.equal_casts import CastKey
from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.parameters import FrozenShapes
from hf_pyao.engine.runtime.policy import Decision, Policy
from hf_pyao.engine.runtime.slots import ANCHOR, NO_SLOT, SHARED, Slot
from hf_pyao.engine.transfer.compute_streams import current_stream, streams_now
from hf_pyao.engine.transfer.graph_task import NO_TASK
from hf_pyao.metrics import MicroBatchStats

if TYPE_CHECKING:
    from hf_pyao.engine.recompute.recomputer import CallRecomputation
    from hf_pyao.engine.runtime.saved_tensor import SavedStorage


class SlotEntry:
    """A slot of a layer, and what its policy decided on it last."""

    __slots__ = ("decision", "policy", "slot", "stays")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.policy: Policy | None = None
        """Who decided; None: no one whose decision holds from call to call."""
        self.stays: str | None = None
        self.decision: Decision | None = None

    def remember(self, policy: Policy, stays: str | None, decision: Decision) -> None:
        """Remember what *policy* decided; *stays* was the reason to stay in any case."""
        self.stays = stays
        self.decision = decision
        self.policy = policy


class Layer:
    """A module whose saved tensors are offloaded."""

    __slots__ = ("_apart", "_entries", "_unnamed", "fqn", "index")

    def __init__(self, index: int, fqn: str) -> None:
        self.index = index
        self.fqn = fqn
        """Qualified name."""
        self._entries: dict[bool, list[SlotEntry]] = {True: [], False: []}
        self._unnamed: dict[str, Slot] = {}
        self._apart: dict[tuple[str, str, int], Slot] = {}

    def entries(self, is_last_run: bool) -> list[SlotEntry]:
        """Return what its newest such call saved, in order: the next is likely to save the same.

        The list is never changed.
        """
        return self._entries[is_last_run]

    def remember(self, is_last_run: bool, entries: list[SlotEntry]) -> None:
        """Remember what a call has saved."""
        self._entries[is_last_run] = entries

    def unnamed(self, path: str) -> Slot:
        """Return the name of what a sub-module saves and what is no slot, such as parameters."""
        slot = self._unnamed.get(path)
        if slot is None:
            slot = self._unnamed[path] = Slot(self.fqn, self.index, path, NO_SLOT, 0, None)
        return slot

    def apart(self, kind: str, path: str, ordinal: int, nbytes: int, dtype: torch.dtype) -> Slot:
        """Return a slot of a *kind* that is counted apart: anchors, and what layers share."""
        slot = self._apart.get((kind, path, ordinal))
        if slot is None or slot.nbytes != nbytes or slot.dtype != dtype:
            slot = Slot(self.fqn, self.index, path, ordinal, nbytes, dtype, kind)
            self._apart[kind, path, ordinal] = slot
        return slot


class LayerCall:
    """One execution of a layer. Everything is keyed by it, never by the layer's name."""

    recomputation: CallRecomputation | None = None
    """What of it is traced, dropped and rebuilt; None if nothing is."""
    cast_input: torch.Tensor | None = None
    """Input of the projection that runs, which autocast casts for it."""
    backward_task = NO_TASK
    """Id of the graph task in which its backward started last."""
    is_open = True
    is_forked = False
    """True once it saved something on another compute stream than its forward's."""
    num_slots = 0
    """Distinct storages saved so far, without those that layers share."""
    num_shared = 0
    """Those that layers share."""
    _owns_entries = False

    def __init__(
        self,
        layer: Layer,
        tape: Tape,
        previous: LayerCall | None,
        *,
        is_last_run: bool = True,
        shared_keys: frozenset[int] = frozenset(),
        frozen_shapes: FrozenShapes | None = None,
        is_compiled: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """Open a call.

        Args:
            layer: the layer that runs.
            tape: that of the forward.
            previous: the call before it in forward order.
            is_last_run: False if the layer runs again in this forward.
            shared_keys: storages among its inputs that other layers get too (masks, rotary tables).
            frozen_shapes: given under autocast.
            is_compiled: compiled code runs around it, which must not trace what autograd calls
                back.
            observer: hears of its sub-modules.
        """
        self.layer = layer
        self.tape = tape
        self.previous = previous
        self.is_last_run = is_last_run
        self.shared_keys = shared_keys
        self.is_autocast = frozen_shapes is not None
        self.frozen_shapes = frozen_shapes or _NO_SHAPES
        self.is_compiled = is_compiled
        self.policy = tape.policy
        self.stats = tape.stats
        self.table = tape.table
        self.observer = observer
        self.paths = [""]
        """Stack of the sub-modules that are running."""
        self.entries = layer.entries(is_last_run)
        """Slots saved so far, and behind them what the call before saved besides."""
        self.records: list[weakref.ref[SavedStorage]] = []
        """What was moved, in the order of packing."""
        self.casts: dict[CastKey, weakref.ref[SavedStorage]] = {}
        """Casts of projections' inputs that were moved, until its forward ends."""
        self.saved_shapes: set[tuple[int, ...]] = set()
        """Shapes of what was saved so far, kept where a lossy codec must know statistics by
        shape."""
        self.put_off: list[weakref.ref[SavedStorage]] = []
        """Those whose copies are queued as the layer ends."""
        self._anchors: dict[int, Slot] = {}
        self._num_apart: dict[tuple[str, str], int] = {}

    @property
    def fqn(self) -> str:
        """Qualified name of the layer."""
        return self.layer.fqn

    # ---- its forward ---------------------------------------------------------------------------

    def recompute_with(self, recomputation: CallRecomputation) -> None:
        """Trace what is saved from here on."""
        self.recomputation = recomputation

    def fork(self) -> None:
        """Record that it saves something on another compute stream than its forward's."""
        self.is_forked = True

    def enter(self, path: str, cast_input: torch.Tensor | None) -> None:
        """Enter a sub-module; *cast_input* is what autocast would cast for it."""
        self.paths.append(path)
        self.cast_input = cast_input

    def leave(self) -> None:
        """Leave a sub-module."""
        self.cast_input = None
        if len(self.paths) > 1:
            self.paths.pop()

    def next_entry(self, nbytes: int, dtype: torch.dtype) -> SlotEntry:
        """Return the entry of a storage that was not saved before.

        Mostly it is the one that the layer's call before had at this place.
        """
        index = self.num_slots
        self.num_slots = index + 1
        if index < len(self.entries):
            entry = self.entries[index]
            slot = entry.slot
            if slot.path == self.paths[-1] and slot.nbytes == nbytes and slot.dtype is dtype:
                return entry
        return self._new_entry(index, nbytes, dtype)

    def _new_entry(self, index: int, nbytes: int, dtype: torch.dtype) -> SlotEntry:
        layer, path = self.layer, self.paths[-1]
        if not self._owns_entries:
            self.entries = self.entries.copy()
            self._owns_entries = True
        entries = self.entries
        if index < len(entries) and entries[index].slot.path == path:
            ordinal = entries[index].slot.ordinal
        else:
            del entries[index:]  # from here on it saves other things than the call before
            ordinal = sum(entry.slot.path == path for entry in entries)
        entry = SlotEntry(Slot(layer.fqn, layer.index, path, ordinal, nbytes, dtype))
        entries[index : index + 1] = [entry]
        return entry

    def anchor(self, key: int, path: str, nbytes: int, dtype: torch.dtype) -> Slot:
        """Return the slot under which storage *key* is stored, which autograd has not saved."""
        slot = self._anchors.get(key)
        if slot is None:
            slot = self._anchors[key] = self._slot_apart(ANCHOR, path, nbytes, dtype)
        return slot

    def shared(self, nbytes: int, dtype: torch.dtype) -> Slot:
        """Return the slot of a storage that other layers get too, and that none has saved yet."""
        self.num_shared += 1
        return self._slot_apart(SHARED, self.paths[-1], nbytes, dtype)

    def _slot_apart(self, kind: str, path: str, nbytes: int, dtype: torch.dtype) -> Slot:
        ordinal = self._num_apart.get((kind, path), 0)
        self._num_apart[kind, path] = ordinal + 1
        return self.layer.apart(kind, path, ordinal, nbytes, dtype)

    def is_first_save_of_anchor(self, key: int) -> bool:
        """Say whether autograd saves storage *key*, an anchor so far, for the first time now."""
        return bool(self._anchors) and self._anchors.pop(key, None) is not None

    def close(self) -> None:
        """End its forward. It may be called again, also where it was interrupted."""
        if self.is_open:
            self.is_open = False
            self.layer.remember(self.is_last_run, self.entries)
            self._owns_entries = False
            self.tape.stats.num_slots += self.num_slots + self.num_shared
        self.cast_input = None
        self.casts.clear()  # their keys hold the graph, which holds the call

    # ---- its backward --------------------------------------------------------------------------

    def start_backward(self, task: int) -> None:
        """Begin its backward, in graph task *task*."""
        self.backward_task = task
        self.tape.start_backward()

    def live_records(self) -> list[SavedStorage]:
        """Return the storages that some graph node may still ask for, in pack order."""
        return [record for ref in self.records if (record := ref()) is not None]


_NO_SHAPES = FrozenShapes()

Entry: TypeAlias = "Slot | weakref.ref[Any]"
"""What became of a storage: the slot under which it was kept, or what stands for it elsewhere."""

Entries: TypeAlias = "Slot | list[Entry]"
"""What became of a storage and of what it held later, in order; the slot alone where it was kept
at once."""


class StorageTable:
    """What became of each storage seen on a tape, keyed by storage identity.

    A weak reference is held for every key, which keeps the address of the storage object (not its
    memory) from being used for another one: a bare data pointer would be recycled.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entries] = {}
        """Key of a storage (``_cdata``) -> what became of it."""

    def add(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Record what became of *storage*, or of its content since the last change."""
        known = self.entries.get(storage._cdata)
        if known is None:
            self.entries[storage._weak_ref()] = [entry]  # type: ignore[index]
        elif isinstance(known, list):
            known.append(entry)

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
    """The layer calls of one forward.

    It opens as the forward begins, takes no more calls once its backward or another forward began,
    and is over when no saved storage of it is left. Records hold their call, calls
    hold the tape, and the tape holds neither, so that an abandoned one disappears with its graph.
    """

    def __init__(
        self, policy: Policy, number: int, runs_before: Mapping[int, int], *, is_announced: bool
    ) -> None:
        """Open a tape.

        Args:
            policy: decides in this forward.
            number: tells it from others of its engine.
            runs_before: how often each layer ran in the forward before, by index.
            is_announced: the module that runs the layers told of the forward; else that was
                concluded from the order of the layers.
        """
        self.num_runs: dict[int, int] = {}
        """How often each layer has run in this one."""
        self._runs_before = runs_before
        self.policy = policy
        self.number = number
        self.is_announced = is_announced
        self.stats = MicroBatchStats()
        self.table = StorageTable()
        self.calls: list[weakref.ref[LayerCall]] = []
        self.last_call: LayerCall | None = None
        self.has_run_backward = False
        self.is_failed = False
        self._counted_with = [self.stats]
        """Figures of the forwards of its micro-batch; none once they were counted."""
        self._homes = streams_now()
        """The compute stream on which it began; of a further device the first one seen."""
        self.has_streams = bool(self._homes)
        """False where compute has no streams, as on a CPU: nothing is elsewhere."""

    def is_elsewhere(self, device: torch.device) -> bool:
        """Say whether compute on *device* is on another stream now than this forward's."""
        stream = current_stream(device)
        return stream is not None and self._homes.setdefault(device, stream) != stream

    @property
    def accepts_calls(self) -> bool:
        """False once another layer call would belong to another forward."""
        return not (self.has_run_backward or self.is_failed)

    def starts_over(self, layer: Layer) -> bool:
        """Say whether a call of *layer* begins a new forward, where no one else tells.

        Layers need not run in the order of their indices (a UNet's, or where attention and MLP are
        layers of their own), so that this is asked only where the stack is gone around.
        """
        if self.is_announced or self.last_call is None:
            return False
        return layer.index < self.last_call.layer.index

    def count_run(self, layer: Layer) -> bool:
        """Count a run of *layer*; say whether it is the last one in this forward.

        How often a layer runs is known from the forward before.
        """
        count = self.num_runs[layer.index] = self.num_runs.get(layer.index, 0) + 1
        return count >= self._runs_before.get(layer.index, 1)

    def add(self, call: LayerCall) -> None:
        """Append *call*, which has just begun."""
        self.calls.append(weakref.ref(call))
        self.last_call = call

    def start_backward(self) -> None:
        """Record that a backward reached one of its calls."""
        self.has_run_backward = True

    def fail(self) -> None:
        """Record that its forward failed."""
        self.is_failed = True

    def live_calls(self) -> Iterator[LayerCall]:
        """Yield the calls that some graph node still belongs to, in forward order."""
        for ref in self.calls:
            if (call := ref()) is not None:
                yield call

    def live_records(self) -> Iterator[SavedStorage]:
        """Yield the storages that some graph node may still ask for."""
        for call in self.live_calls():
            yield from call.live_records()

    def live_recomputations(self) -> Iterator[CallRecomputation]:
        """Yield what was dropped in the calls that some graph node still belongs to."""
        for call in self.live_calls():
            if call.recomputation is not None:
                yield call.recomputation

    def is_live(self) -> bool:
        """Say whether some graph node may still ask for a storage of this tape."""
        if next(self.live_records(), None) is not None:
            return True
        return any(recomputation.is_live() for recomputation in self.live_recomputations())

    def close(self) -> None:
        """Take no more calls. Storages that live on are released as their graph goes."""
        self.last_call = None
        self.table.clear()

    # ---- its micro-batch: the forwards whose backward is one ------------------------------------

    def absorb(self, other: Tape) -> None:
        """Take *other*'s figures in, whose backward is a part of this one's."""
        if other._counted_with is not self._counted_with:
            if other._counted_with and self._counted_with:
                self._counted_with += other._counted_with
                other._counted_with = self._counted_with

    def leave_out(self) -> None:
        """Leave it out of all figures: it failed, and is run again."""
        self._counted_with.clear()

    def publish(self) -> MicroBatchStats | None:
        """Return what the micro-batch came to, the first time; None if nothing was packed in it."""
        group = self._counted_with
        if not any(stats.num_packs for stats in group):
            return None
        first, *others = group
        group.clear()
        for stats in others:
            first.add(stats)
        return first
