"""The engine: what happens to the saved tensors of layer calls, from pack to unpack.

It knows layers by number and name only; module hooks (``lifecycle``) drive it. The forward side is
in ``packing``, the backward side in ``unpacking``; here they are put together, and forwards and
micro-batches begin and end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import torch

from hf_pyao.engine.codecs import Codec
from hf_pyao.engine.runtime.backward_order import BackwardOrder, Reversed
from hf_pyao.engine.runtime.idle_warnings import IdleWarnings
from hf_pyao.engine.runtime.observer import Observer, Observers
from hf_pyao.engine.runtime.packing import Packer
from hf_pyao.engine.runtime.parameters import FrozenShapes, is_parameter
from hf_pyao.engine.runtime.policy import LayerRun, Policy, as_policy
from hf_pyao.engine.runtime.run_figures import RunFigures
from hf_pyao.engine.runtime.saved_tensor import Handle, SavedTensor
from hf_pyao.engine.runtime.streamed_weights import StreamedWeights
from hf_pyao.engine.runtime.tape import Layer, LayerCall, Tape
from hf_pyao.engine.runtime.unpacking import Unpacker
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.transfer.layout import reason_not_movable
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.mover import Mover
from hf_pyao.engine.transfer.profiler_ranges import named_range
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.metrics import MicroBatchStats
from hf_pyao.no_effect import EffectLedger

if TYPE_CHECKING:
    from hf_pyao.engine.recompute.recomputer import LayerRecomputer
    from hf_pyao.engine.recompute.trace_values import Source


class OffloadEngine:
    """Moves the saved tensors of layer calls to the host and back.

    Args:
        policy: decides per distinct saved storage; see :meth:`use`.
        codec: how moved storages are written, unless a decision names another.
        link: transport, host memory and window; may be shared with other engines.
        recomputer: traces layers of which the policy may recompute something; None: none is.
        backward_order: says which forward's backward follows; by default the newest.
        buffer_keys: returns the storage keys of the model's buffers, which never move.
        enters_always: layers are entered also while the policy keeps everything.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        codec: Codec,
        link: LinkContext,
        recomputer: LayerRecomputer | None = None,
        backward_order: BackwardOrder | None = None,
        buffer_keys: Callable[[], Container[int]] = frozenset,
        enters_always: bool = False,
    ) -> None:
        self.codec = codec
        self.link = link
        self.num_layer_calls = 0
        self.effects = EffectLedger()
        """Settings that turned out to do nothing."""
        self.idle_warnings = IdleWarnings(self.effects)
        self._passed_over = ""
        """Why hooks stayed off, in the last layer call in which they did; empty if in none."""
        self._observers: tuple[Observer, ...] = ()
        self._lasting_observers: tuple[Observer, ...] = ()
        self._enters_always = enters_always
        self._weights: StreamedWeights | None = None
        self._recomputer = recomputer
        self._find_buffer_keys = buffer_keys
        self._tape: Tape | None = None
        """That of the newest forward."""
        self._open_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()
        """Tapes that may have a backward, or were not counted yet, by number, oldest first."""
        self._num_tapes = 0
        self._num_packs_before = 0
        self._num_runs: dict[int, int] = {}
        """How often each layer ran in the forward before, by index."""
        self.mover = Mover(link)
        self.figures = RunFigures(self.mover)
        self.packer = Packer(codec=codec, mover=self.mover)
        self.use(policy)
        # The unpacker may outlive the engine, in a graph: [Note: Who owns whom] in `weak_calls`.
        self.unpacker = Unpacker(
            mover=self.mover,
            order=backward_order or Reversed(),
            waiting=weakly(self._waiting_tapes, ()),
            on_tapes_done=weakly(self._end_tapes, None),
        )
        self.pack: Callable[[LayerCall, torch.Tensor], Handle] = self.packer.pack
        """Takes over a tensor that autograd saves in a layer call."""
        self.unpack: Callable[[Handle], torch.Tensor] = self.unpacker.unpack
        """Gives it back."""

    # ---- policy and observer -------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """What decides from the next forward on."""
        return self._policy

    def use(self, policy: Policy) -> None:
        """Let *policy* decide from the next forward on.

        Forwards that have begun, and their backward, go on with the policy that they began with.

        Raises:
            ConfigError: *policy* is none.
        """
        self._policy = as_policy(policy)
        if self._policy.may_lose:  # statistics of rows are to be known from the first forward on
            self.packer.note_shapes()

    @property
    def rests(self) -> bool:
        """True while the policy keeps everything: layers are not entered.

        Never, where weights are streamed: what is saved of them is to be seen.
        """
        return self._policy.rests and not (self._enters_always or self._weights is not None)

    @property
    def weights(self) -> StreamedWeights | None:
        """Weights that are streamed; None: all are on the device."""
        return self._weights

    def upload_stalls_ms(self) -> tuple[float, float]:
        """Return how long forward and backward have waited for streamed weights so far, in ms."""
        return (0.0, 0.0) if self._weights is None else self._weights.stalls_ms()

    def stream(self, weights: StreamedWeights | None) -> None:
        """Recognise what layers save of *weights*, from the next forward on; None: of none."""
        self._weights = self.packer.weights = self.unpacker.weights = weights

    def enter_always(self, is_wanted: bool) -> None:
        """Enter layers also while the policy keeps everything, from the next forward on."""
        self._enters_always = is_wanted

    def observe(self, *observers: Observer | None) -> None:
        """Tell *observers* what happens from the next layer call on, in place of those before.

        Those of :meth:`observe_too` are told besides.
        """
        self._observers = tuple(each for each in observers if each is not None)
        self._tell_observers()

    def observe_too(self, observer: Observer) -> None:
        """Tell *observer* until :meth:`stop_observing`, beside the others."""
        self._lasting_observers = (*self._lasting_observers, observer)
        self._tell_observers()

    def stop_observing(self, observer: Observer) -> None:
        """Tell *observer* nothing more."""
        self._observers = tuple(o for o in self._observers if o is not observer)
        self._lasting_observers = tuple(o for o in self._lasting_observers if o is not observer)
        self._tell_observers()

    def _tell_observers(self) -> None:
        observers = (*self._lasting_observers, *self._observers)
        self.mover.tell(Observers(observers) if len(observers) > 1 else next(iter(observers), None))

    @property
    def observer(self) -> Observer | None:
        """Hears what happens; see :meth:`observe`."""
        return self.mover.observer

    # ---- forward -------------------------------------------------------------------------------

    def begin_forward(self, *, is_announced: bool = True) -> None:
        """Note that the model's stack of layers starts a forward: a new tape opens.

        Args:
            is_announced: False if that is only concluded from the order of the layers.
        """
        self.end_forward()
        tape = Tape(
            self._policy.for_forward(), self._num_tapes, self._num_runs, is_announced=is_announced
        )
        self._open_tapes[tape.number] = tape
        self._num_tapes += 1
        self._tape = tape
        self.packer.expect_buffers(self._find_buffer_keys())

    def forward_start(
        self,
        layer: Layer,
        *,
        shared: Sequence[torch.Tensor] = (),
        frozen_shapes: FrozenShapes | None = None,
        reason_not_traceable: Callable[[], str | None] = lambda: None,
        is_compiled: bool = False,
    ) -> LayerCall:
        """Open a call of *layer*; what autograd saves from here on is the engine's.

        Args:
            layer: the layer that runs now.
            shared: tensors among its inputs that other layers get too.
            frozen_shapes: given under autocast, see
                :func:`~hf_pyao.engine.runtime.parameters.is_parameter`.
            reason_not_traceable: asked where something is to be recomputed: says why the layer's
                operations cannot be seen, or returns None.
            is_compiled: compiled code runs around it.
        """
        tape = self._tape
        if tape is None or not tape.accepts_calls or tape.starts_over(layer):
            self.begin_forward(is_announced=False)
            tape = self._tape
        assert tape is not None
        self.num_layer_calls += 1
        self.mover.look_for_watchers()
        call = LayerCall(
            layer,
            tape,
            tape.last_call,
            is_last_run=tape.count_run(layer),
            shared_keys=frozenset(
                tensor.untyped_storage()._cdata
                for tensor in shared
                if reason_not_movable(tensor) is None
            ),
            frozen_shapes=frozen_shapes,
            is_compiled=is_compiled,
            observer=self.observer,
        )
        tape.add(call)
        if self._recomputer is not None:
            self._trace(self._recomputer, call, reason_not_traceable)
        if self.observer is not None:
            self.observer.on_module(call.fqn, "", "forward", is_start=True)
        return call

    def _trace(
        self,
        recomputer: LayerRecomputer,
        call: LayerCall,
        reason_not_traceable: Callable[[], str | None],
    ) -> None:
        buffer_keys, frozen_shapes = self.packer.buffer_keys, call.frozen_shapes

        def is_constant(tensor: torch.Tensor, key: int) -> bool:
            return key in buffer_keys or is_parameter(tensor, frozen_shapes)

        def streamed(tensor: torch.Tensor) -> Source | None:
            return None if self._weights is None else self._weights.find_block(tensor)

        recomputation = recomputer.open(
            LayerRun(call.fqn, call.layer.index, call.is_last_run),
            call.policy,
            call.paths,
            reason_not_traceable=reason_not_traceable,
            is_constant=is_constant,
            streamed=streamed,
            watcher=self.observer,
        )
        if recomputation is not None:
            call.recompute_with(recomputation)
            recomputation.start()

    def pack_of(self, call: LayerCall) -> Callable[[LayerCall, torch.Tensor], Handle]:
        """Return the pack hook for *call*."""
        pack = self.pack if call.recomputation is None else self.packer.pack_traced
        observer = self.observer
        if observer is None:
            return pack

        def observed(call: LayerCall, tensor: torch.Tensor) -> Handle:
            observer.on_pack(call.fqn, call.paths[-1], tensor)
            return pack(call, tensor)

        return observed

    @property
    def unpack_hook(self) -> Callable[[Handle], torch.Tensor]:
        """The unpack hook for what is saved from here on."""
        observer, unpack = self.observer, self.unpack
        if observer is None:
            return unpack

        def observed(handle: Handle) -> torch.Tensor:
            known = handle.storage if isinstance(handle, SavedTensor) else handle
            observer.on_unpack(known.slot)
            return unpack(handle)

        return observed

    def forward_end(self, call: LayerCall, outputs: Sequence[torch.Tensor]) -> None:
        """Close *call*; its backward starts when a gradient reaches one of *outputs*."""
        _close(call)
        for ref in call.put_off:
            if (record := ref()) is not None:
                self.mover.settle(record)
        if self.observer is not None:
            self.observer.on_module(call.fqn, "", "forward", is_start=False)
        with named_range("layer_end", call.fqn):
            self.link.layer_end()

        unpacker = self.unpacker

        def on_gradient(_: tuple[torch.Tensor | None, ...]) -> None:
            unpacker.backward_start(call)

        if call.is_compiled:
            on_gradient = uncompiled(on_gradient)
        for output in outputs:
            # The node and not the tensor, which is the user's: it would warn when it is saved.
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(on_gradient)

    def abort(self) -> None:
        """Throw the newest forward away, which has failed. What it saved goes as its graph goes."""
        tape = self._tape
        if tape is not None:
            tape.fail()
            if tape.last_call is not None:
                _close(tape.last_call)
        self.link.drain()

    # ---- ends ----------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """End the newest forward, whatever its state: what follows is another's."""
        tape, self._tape = self._tape, None
        self.unpacker.finalize_backward()  # of one that failed
        if tape is not None:
            self._num_packs_before += tape.stats.num_packs
            if not tape.is_failed:
                self._num_runs = tape.num_runs
            tape.close()
        for tape in list(self._open_tapes.values()):
            if tape.has_run_backward:
                self._publish(tape)
            elif tape.is_live():
                continue
            self._open_tapes.pop(tape.number, None)

    def end(self) -> None:
        """End all forwards: nothing more comes."""
        self.end_forward()
        self._open_tapes.clear()

    def give_up(self, since: int) -> None:
        """End the forwards from number *since* on, which failed; they count nowhere.

        Args:
            since: :attr:`num_forwards` when the first of them began.
        """
        for tape in list(self._open_tapes.values()):
            if tape.number >= since:
                tape.leave_out()
        self.end_forward()

    def _waiting_tapes(self) -> list[Tape]:
        """Return the tapes whose backward has not begun, oldest first."""
        return [tape for tape in list(self._open_tapes.values()) if not tape.has_run_backward]

    def _end_tapes(self, tapes: Sequence[Tape]) -> None:
        """Note that a backward pass through *tapes* is over."""
        for tape in tapes[1:]:
            tapes[0].absorb(tape)
        if not any(tape.is_live() for tape in tapes):
            for tape in tapes:
                self._publish(tape)

    def _publish(self, tape: Tape) -> None:
        """Count the micro-batch of *tape*, once."""
        stats = tape.publish()
        if stats is None:
            return
        self.figures.count(stats)
        if self.observer is not None:
            self.observer.on_micro_batch(stats)
        is_meant = self.policy.name == "off" or self.policy.rests
        if not (stats.offloaded_bytes or stats.recomputed_bytes or is_meant):
            self.idle_warnings.nothing_moved(stats)
        self.effects.micro_batch_is_over(stats)

    # ---- what happened -------------------------------------------------------------------------

    @property
    def num_packs(self) -> int:
        """Calls of the pack hook so far, in all forwards."""
        tape = self._tape
        return self._num_packs_before + (0 if tape is None else tape.stats.num_packs)

    @property
    def is_under_way(self) -> bool:
        """True while a backward is to come, or runs, that asks for what a forward has saved."""
        runs = self.unpacker.running_tapes
        return any(
            (not tape.has_run_backward or tape in runs) and not tape.is_failed and tape.is_live()
            for tape in list(self._open_tapes.values())
        )

    @property
    def has_packed_nothing(self) -> bool:
        """True if the newest forward has come to its end, and nothing was packed in it."""
        tape = self._tape
        return tape is not None and not (tape.is_failed or tape.stats.num_packs)

    @property
    def num_forwards(self) -> int:
        """Forwards begun so far."""
        return self._num_tapes

    @property
    def failed_in(self) -> str:
        """Where the newest forward, or a backward, has failed; empty if in no layer.

        To be asked before anything else begins.
        """
        call = self.unpacker.running_call
        if call is not None:
            return f"the backward of layer {call.fqn!r}"
        tape = self._tape
        if tape is not None and tape.is_failed and tape.last_call is not None:
            return f"the forward of layer {tape.last_call.fqn!r}"
        return ""

    def stats_since(self, since: int) -> list[MicroBatchStats]:
        """Return the figures so far of the forwards from number *since* on that still count."""
        return [tape.stats for tape in list(self._open_tapes.values()) if tape.number >= since]

    def note_passed_over(self, reason: str) -> None:
        """Note why hooks stayed off in a layer call."""
        self._passed_over = reason

    def warn_idle(self) -> None:
        """Warn, once, that a step went by in which nothing was packed."""
        if self.rests:
            return
        self.idle_warnings.nothing_packed(
            have_layers_run=self.num_layer_calls > 0, passed_over=self._passed_over
        )


def _close(call: LayerCall) -> None:
    """End what goes on in *call*; it may be called again, also where it was interrupted."""
    recomputation = call.recomputation
    if recomputation is not None:
        recomputation.close()  # first: it sees every operation of this thread
    call.close()
