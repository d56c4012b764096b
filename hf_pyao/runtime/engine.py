"""The engine: what happens to the saved tensors of layer calls, from pack to unpack.

It knows layers by number and name only; module hooks (``lifecycle``) drive it. The forward side is
in ``packing``, the backward side in ``unpacking``; here they are put together, and micro-batches
begin and end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from hf_pyao.codecs import Codec
from hf_pyao.metrics import MicroBatchStats, RunTotals
from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.compute_streams import ComputeStreams
from hf_pyao.runtime.idle_warnings import IdleWarnings
from hf_pyao.runtime.layout import reason_not_movable
from hf_pyao.runtime.offloading import StorageOffloader
from hf_pyao.runtime.packing import Packer
from hf_pyao.runtime.parameters import FrozenShapes
from hf_pyao.runtime.policy import Policy, RecomputingPolicy
from hf_pyao.runtime.ranges import named_range
from hf_pyao.runtime.recomputer import Recomputer
from hf_pyao.runtime.saved_tensor import (
    RELEASED,
    RELOADING,
    KeptTensor,
    SavedStorage,
    SavedTensor,
)
from hf_pyao.runtime.tape import Layer, LayerCall, Tape
from hf_pyao.runtime.transport import Transport
from hf_pyao.runtime.unpacking import Unpacker
from hf_pyao.runtime.window import OffloadWindow, ReloadWindow
from hf_pyao.stores import HostPool


class _Here(threading.local):
    """What the engine is at on the calling thread."""

    tape: Tape | None = None
    """Takes the thread's forwards. Each thread has its own: they are no one micro-batch, and what
    one does ends nothing of the other's."""


class OffloadEngine:
    """Moves the saved tensors of layer calls to the host and back.

    Args:
        policy: decides per distinct saved storage.
        codec: how offloaded storages are written, unless the decision names another.
        transport: copies bytes.
        pool: host memory.
        window_bytes: bound on bytes in flight in each direction; None is the paper's rule, to meet
            at the end of each layer.
        buffer_keys: returns the storage keys of the model's buffers, which never move.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        codec: Codec,
        transport: Transport,
        pool: HostPool,
        window_bytes: int | None,
        buffer_keys: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.policy = policy
        self.codec = codec
        self.transport = transport
        self.pool = pool
        self.totals = RunTotals()
        self.last_stats: MicroBatchStats | None = None
        self.num_layer_calls = 0
        self._num_packs_before = 0
        self.idle_warnings = IdleWarnings()
        self._find_buffer_keys = buffer_keys
        self.passed_over = ""
        """Why hooks stayed off when a layer was entered last in vain; empty if that never was."""
        self._here = _Here()
        self._open_tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        streams = ComputeStreams()
        self._offloads = OffloadWindow(transport, window_bytes, streams)
        self._reloads = ReloadWindow(window_bytes)
        self.packer = Packer(
            policy=policy,
            codec=codec,
            handles=transport.handles,
            offloader=StorageOffloader(
                transport=transport,
                pool=pool,
                window=self._offloads,
                streams=streams,
                on_release=self._release,
            ),
        )
        self.unpacker = Unpacker(
            transport=transport,
            offloads=self._offloads,
            reloads=self._reloads,
            meets_at_layer_end=window_bytes is None,
            on_tape_done=self._publish,
        )
        self.recomputer: Recomputer | None = None
        if isinstance(policy, RecomputingPolicy):
            self.recomputer = Recomputer(policy, store=self.packer.store, load=self.unpacker.load)
            self.packer.recomputer = self.unpacker.recomputer = self.recomputer
        self.pack: Callable[[LayerCall, torch.Tensor], KeptTensor | SavedTensor] = (
            self.packer.pack if self.recomputer is None else self.packer.pack_traced
        )
        """Takes over a tensor that autograd saves in a layer call."""
        self.unpack: Callable[[KeptTensor | SavedTensor], torch.Tensor] = self.unpacker.unpack
        """Gives it back."""

    # ---- forward -------------------------------------------------------------------------------

    def begin_forward(self, *, is_announced: bool = True) -> None:
        """Note that the model's stack of layers starts a forward.

        It belongs to the micro-batch under way if an earlier forward still waits for its backward
        (two forwards before one backward); otherwise the next tape opens.

        Args:
            is_announced: False if that is only concluded from the order of the layers.
        """
        tape = self._here.tape
        if tape is None or not tape.accepts_forward or not tape.has_live_records():
            self.end_micro_batch()
            tape = Tape()
            self._open_tapes.add(tape)
            self._here.tape = tape
            self.packer.buffer_keys = self._find_buffer_keys()
        tape.is_announced = is_announced

    def forward_start(
        self,
        layer: Layer,
        *,
        is_kept: bool = False,
        shared: Sequence[torch.Tensor] = (),
        frozen_shapes: FrozenShapes | None = None,
        reason_not_traceable: Callable[[], str | None] = lambda: None,
    ) -> LayerCall:
        """Open a call of *layer*; what autograd saves from here on is the engine's.

        Args:
            layer: the layer that runs now.
            is_kept: keep what it saves, since backward begins with it.
            shared: tensors among its inputs that other layers get too.
            frozen_shapes: given under autocast, see
                :func:`~hf_pyao.runtime.parameters.is_parameter`.
            reason_not_traceable: asked where something is to be recomputed: says why the layer's
                operations cannot be seen, or returns None.
        """
        tape = self._here.tape
        if tape is None or not tape.accepts_forward or tape.starts_over(layer):
            self.begin_forward(is_announced=False)
            tape = self._here.tape
        assert tape is not None
        self.num_layer_calls += 1
        call = tape.open_call(layer, is_kept)
        try:
            self._prepare(call, shared, frozen_shapes, reason_not_traceable)
            return call
        except BaseException:
            self.abort(call)  # the caller has no hold of it yet
            raise

    def _prepare(
        self,
        call: LayerCall,
        shared: Sequence[torch.Tensor],
        frozen_shapes: FrozenShapes | None,
        reason_not_traceable: Callable[[], str | None],
    ) -> None:
        if frozen_shapes is not None:
            call.is_autocast = True
            call.frozen_shapes = frozen_shapes
        if shared:
            call.shared_keys = frozenset(
                tensor.untyped_storage()._cdata
                for tensor in shared
                if reason_not_movable(tensor) is None
            )
        if self.recomputer is not None and not call.is_kept:
            self.recomputer.open(call, reason_not_traceable, self.packer.buffer_keys)

    def forward_end(self, call: LayerCall, outputs: Sequence[torch.Tensor]) -> None:
        """Close *call*; its backward starts when a gradient reaches one of *outputs*."""
        self._close(call)
        call.settle()
        with named_range("layer_end", call.fqn):
            self._offloads.layer_end()

        def on_gradient(_: tuple[torch.Tensor | None, ...]) -> None:
            self.unpacker.backward_start(call)

        if call.is_compiled:
            on_gradient = uncompiled(on_gradient)
        for output in outputs:
            # The node and not the tensor, which is the user's: it would warn when it is saved.
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(on_gradient)

    def abort(self, call: LayerCall) -> None:
        """Close *call*, whose forward failed. What it saved goes as its graph goes."""
        call.tape.is_failed = True
        self._close(call)
        self._offloads.drain()

    def _close(self, call: LayerCall) -> None:
        """End what goes on in *call*; it may be called again, also where it was interrupted."""
        if self.recomputer is not None:
            self.recomputer.close(call)  # first: it sees every operation of this thread
        if call.is_open:
            call.is_open = False
            call.layer.slots, call.owns_slots = call.slots, False
            call.tape.stats.num_slots += call.num_slots
        call.cast_input = None
        call.casts.clear()  # their keys hold the graph, which holds the call

    # ---- ends ----------------------------------------------------------------------------------

    def end_micro_batch(self) -> None:
        """Close this thread's tape, whatever its state: after a failure, or before the next."""
        tape, self._here.tape = self._here.tape, None
        self.unpacker.finalize_backward()
        if tape is not None:
            self._close_tape(tape)

    def end(self) -> None:
        """Close the tapes of all threads: nothing more comes."""
        self.end_micro_batch()
        for tape in list(self._open_tapes):
            self._close_tape(tape)

    def _close_tape(self, tape: Tape) -> None:
        if tape in self._open_tapes:
            self._open_tapes.discard(tape)
            self._num_packs_before += tape.stats.num_packs
        tape.close()
        self._offloads.forget_streams()
        if tape.has_run_backward:
            self._publish(tape)

    @property
    def num_packs(self) -> int:
        """Calls of the pack hook so far, in all micro-batches of all threads."""
        return self._num_packs_before + sum(tape.stats.num_packs for tape in list(self._open_tapes))

    def release_done(self) -> None:
        """Let go of device copies that have left; for moments in which nothing else would."""
        self._offloads.release_done()

    def warn_idle(self) -> None:
        """Warn, once, that a step went by in which nothing was packed."""
        self.idle_warnings.nothing_packed(
            have_layers_run=self.num_layer_calls > 0, passed_over=self.passed_over
        )

    def _publish(self, tape: Tape) -> None:
        stats = tape.stats
        if tape.is_published or not stats.num_packs:
            return
        tape.is_published = True
        self.transport.collect(stats)
        self.pool.settle()
        stats.pool_bytes = self.pool.pool_bytes
        stats.host_peak_bytes = self.pool.peak_used_bytes
        self.pool.reset_peak()
        self.last_stats = stats
        self.totals.add(stats)
        if not (stats.offloaded_bytes or stats.recomputed_bytes) and self.policy.name != "off":
            self.idle_warnings.nothing_moved(stats)

    def _release(self, record: SavedStorage) -> None:
        """Give back the buffers of a storage that no node can ask for any more.

        Runs in a destructor: on any thread and inside any other call, so it takes no lock.
        """
        if record.residency is RELOADING:
            self.transport.retire(record.reload_ticket)
            self._reloads.consumed(record)
        if record.home is not None:
            if record.lingering is not None:
                record.home.await_everywhere()
            else:
                record.home.await_visitors()
        record.residency = RELEASED
        record.lingering = record.buffer = record.decoded = None
        record.payload = ()
        host = record.host
        if host is not None:
            record.host = None
            # The newest copy that uses it stands for the one before.
            last = record.offload_ticket if record.reload_ticket is None else record.reload_ticket
            self.pool.release(host, last)
