"""Hooks that put the layers of a model into segments: see [Note: Segments] in ``segments``.

A layer is entered as without segments, so that tape, policies and reports see a call of it; of the
calls of one segment, the first saves one tensor, the others none. The model's own loop calls the
layers. What it does in between is not seen, and nothing of it may be lost: a segment goes on only
where a layer gets, unchanged, the very tensor that the layer before has returned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao.engine.recompute.kept_attention import SeenAttention
from hf_pyao.engine.recompute.noted_caches import Held, hold, why_not_noted
from hf_pyao.engine.recompute.operations import Rules
from hf_pyao.engine.recompute.second_run import unpack
from hf_pyao.engine.recompute.segment_calls import (
    InnerHooks,
    LayerState,
    MadeBefore,
    RecordedCall,
    SegmentInput,
    StateOfCall,
    devices_of,
    noted,
    objects_in,
)
from hf_pyao.engine.recompute.segments import CHANGES_INPUT, FilledSegments, Segment
from hf_pyao.engine.recompute.verification import SEGMENT, SecondRuns
from hf_pyao.engine.rerun.generators import ExclusiveDraws
from hf_pyao.engine.rerun.kinds import Kinds
from hf_pyao.engine.rerun.modes import reason_of_modes_and_hooks
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.lifecycle import COMPILED, Lifecycle
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.runtime.packing import SHARED_BY_LAYERS
from hf_pyao.engine.runtime.parameters import is_parameter
from hf_pyao.engine.runtime.running import Token
from hf_pyao.engine.runtime.saved_tensor import Handle
from hf_pyao.engine.runtime.streamed_weights import StreamedTensor
from hf_pyao.engine.runtime.tape import Layer, LayerCall, Tape
from hf_pyao.engine.torch_hooks.layer_inputs import shared_inputs, tensors_in
from hf_pyao.engine.torch_hooks.passing_over import CHECKPOINTED, reason_to_pass_over
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import pack_hook, push_hooks
from hf_pyao.engine.transfer.layout import reason_not_movable
from hf_pyao.errors import ConflictError
from hf_pyao.training_engines import is_compiled

logger = logging.getLogger(__name__)

RUNS_AGAIN = "its layer runs again as a whole"
"""Why nothing of a layer in a segment is recomputed by itself."""

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names under which transformers' layers get a cache of keys and values."""

OTHER_CHECKPOINTING = (
    "{what}, and checkpoint_every is {length}: the layers would run again twice. Switch the other "
    "checkpointing off (gradient_checkpointing=False, activation_checkpointing=False from "
    "transformers 5.23 on; no checkpoint_wrapper around layers), or give checkpoint_every=0."
)
"""Of an error."""


class EngineKeeper:
    """Has the engine keep the inputs of segments, as what their first layer saves."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.rules = Rules()
        self._counted: weakref.WeakKeyDictionary[Tape, dict[int, StorageWeakRef]] = (
            weakref.WeakKeyDictionary()
        )
        """Of each forward the storages that were counted, by address: it is not used again as long
        as there is a reference."""

    def streamed(self, call: LayerCall, tensor: Tensor) -> StreamedTensor | None:
        """Return what stands for *tensor* if it is a view of a streamed weight; else None."""
        weights = self._engine.weights
        give = None if weights is None else weights.find(tensor)
        if give is None:
            return None
        return StreamedTensor(give, call, call.layer.unnamed(call.paths[-1]))

    def is_streamed(self, tensor: Tensor) -> bool:
        """Say whether *tensor* is a view of a streamed weight."""
        weights = self._engine.weights
        return weights is not None and weights.find(tensor) is not None

    def note_dropped(self, call: LayerCall, tensor: Tensor) -> None:
        """Count *tensor*'s storage, which autograd would hold and which is made again instead."""
        if type(tensor) is not Tensor and reason_not_movable(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        seen = self._counted.setdefault(call.tape, {})
        if key in seen or key in call.table.entries or key in self._engine.packer.buffer_keys:
            return
        if is_parameter(tensor, call.frozen_shapes):
            return
        nbytes, stats = storage.nbytes(), call.stats
        seen[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        stats.would_hold_bytes += nbytes
        if key in call.shared_keys:
            stats.kept_bytes[SHARED_BY_LAYERS] += nbytes
        else:
            stats.recomputed_bytes += nbytes

    def _forget_dropped(self, call: LayerCall, tensor: Tensor) -> None:
        """Take back what was counted for *tensor*, which the engine is to keep after all."""
        if type(tensor) is not Tensor and reason_not_movable(tensor) is not None:
            return
        storage, stats = tensor.untyped_storage(), call.stats
        key, nbytes = storage._cdata, storage.nbytes()
        if self._counted.get(call.tape, {}).pop(key, None) is None:
            return
        stats.would_hold_bytes -= nbytes
        if key in call.shared_keys:
            stats.kept_bytes[SHARED_BY_LAYERS] -= nbytes
        else:
            stats.recomputed_bytes -= nbytes

    def keep_input(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, the input of *call*."""
        call.enter("", None)  # whichever sub-module it is that saves something first
        try:
            return self.keep(call, tensor)
        finally:
            call.leave()

    def keep(self, call: LayerCall, tensor: Tensor) -> Handle:
        """Take *tensor* over, which the sub-module that runs has made."""
        self._forget_dropped(call, tensor)
        return self._engine.pack_of(call)(call, tensor)

    def give(self, handle: Handle, call: LayerCall) -> Tensor:
        """Give it back to the backward of *call*, the segment's last, which has begun.

        The first one's has not: a call's backward begins as a gradient reaches its outputs.
        """
        handle.belong_to(call)
        return self._engine.unpack_hook(handle)


class _Here(threading.local):
    """What the calling thread is at."""

    segment: weakref.ref[Segment] | None = None
    """That of the newest layer call. The graph alone keeps it."""
    entered: Segment | None = None
    """That of the layer that runs."""
    attention: SeenAttention | None = None
    """What sees its kernels of attention."""
    draws: ExclusiveDraws | None = None
    """What keeps other threads from drawing random numbers while the layer runs."""
    is_running_again = False
    """True while a segment runs again, whose modules are to call no hooks of ours."""


class SegmentLifecycle(Lifecycle):
    """Drives an engine with hooks on a model's layers, and has the layers run again in backward.

    Args:
        length: how many consecutive layers make a segment; 0: none do, as in a plain lifecycle.
        is_nested: the tensors of one layer of a segment at a time are there in backward.
        saves_attention: what kernels of attention return is saved too.
        is_asked_for: the user asked for segments: what cannot go together with them is an error.
            Else they give way to it.
        second_runs: says which forwards are checked; None: none is.
    """

    def __init__(
        self,
        *args: Any,
        length: int,
        is_nested: bool = False,
        saves_attention: bool = False,
        is_asked_for: bool = True,
        second_runs: SecondRuns | None = None,
        **kwargs: Any,
    ) -> None:
        self.length = length
        self._second_runs = second_runs or SecondRuns.unchecked(SEGMENT)
        self.is_nested = is_nested
        self.saves_attention = saves_attention
        self._is_asked_for = is_asked_for
        self._has_seen_attention = False
        super().__init__(*args, **kwargs)
        self.filled = FilledSegments()
        self._keeper = EngineKeeper(self.engine)
        self._here = _Here()
        self._states: weakref.WeakKeyDictionary[nn.Module, LayerState] = weakref.WeakKeyDictionary()
        self._kinds = Kinds()
        self._refused_late: set[Layer] = set()
        """Layers of which a call was refused when it ended."""
        self._refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """Layers that do not run again any more, and why."""
        self._has_looked_for_sharding = False
        self._said: set[str] = set()

    def remove(self) -> None:
        """Take everything down. Forwards that wait for their backward keep what they noted."""
        super().remove()
        self._states.clear()  # it may hold copies of the tables of hooks, which hold this object

    def set_segments(
        self, length: int, *, is_nested: bool = False, saves_attention: bool = False
    ) -> None:
        """Put as many layers into a segment, from the next layer call on.

        Forwards that have begun, and their backward, lose nothing: each call is in a segment, or
        in none, from its beginning to its backward.

        Args:
            length: how many consecutive layers; 0: no segments.
            is_nested: as in the class.
            saves_attention: as in the class.
        """
        self.length = length
        self.is_nested = is_nested
        self.saves_attention = saves_attention
        self._has_looked_for_sharding = False
        self._second_runs.begin_anew()
        self.engine.enter_always(length > 0)

    # ---- moments -------------------------------------------------------------------------------

    def begin_forward(self, stack: nn.Module) -> None:
        """Note that the stack of layers starts a forward.

        Raises:
            ConflictError: checkpointing was switched on.
        """
        if not self._here.is_running_again:
            super().begin_forward(stack)

    def _wrap_checkpointing(self) -> None:
        """Refuse the checkpointing of others, which may be switched on at any time."""
        is_on = any(getattr(ref(), "gradient_checkpointing", False) for ref in self._may_checkpoint)
        if is_on and self.length:
            what = "gradient checkpointing was switched on after the model was attached"
            if self._is_asked_for:
                raise ConflictError(OTHER_CHECKPOINTING.format(what=what, length=self.length))
            self._say_once(f"the layers run again by it no more, since {what}")
            self.set_segments(0)
        if not self.length:
            super()._wrap_checkpointing()
            return
        if not self._has_looked_for_sharding:
            self._has_looked_for_sharding = True
            self._look_for_sharding()

    def _look_for_sharding(self) -> None:
        """Run layers again one by one where their parameters are gathered one by one."""
        stack = self._stack()
        if self.length == 1 or stack is None:
            return
        reason = self._sharding.reason_to_run_alone(stack)
        if reason is not None:
            self._say_once(
                f"of every layer the input is saved, as with checkpoint_every=1, since {reason}"
            )
            self.length = 1

    def enter(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_checkpointed: bool = False,
        is_compiling: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Have *module*'s layer join a segment, or begin one.

        Raises:
            ConflictError: it runs inside the checkpointing of others.
        """
        if self._here.is_running_again:
            return None
        if not self.length:
            return super().enter(
                module, args, kwargs, is_checkpointed=is_checkpointed, is_compiling=is_compiling
            )
        if not module.training:
            return super().enter(module, args, kwargs, is_compiling=is_compiling)
        if not torch.is_grad_enabled():
            return None
        layer = self._layers.get(module)
        if layer is None or self._is_removed:
            return None
        reason = reason_to_pass_over()
        if reason is not None:
            is_others = reason == CHECKPOINTED and torch._C._current_graph_task_id() == -1
            if is_others and self._is_asked_for:
                what = f"layer {layer.fqn!r} runs in a checkpoint"
                raise ConflictError(OTHER_CHECKPOINTING.format(what=what, length=self.length))
            self.engine.passed_over = reason
            return None
        refused = self._refusals.get(module) or reason_of_modes_and_hooks()
        refused = refused or _reason_to_refuse(module, args, kwargs, is_compiling) or ""
        state = None if refused else self._state_of(module, args, kwargs)
        refused = refused or (state.reason_unknown() if state is not None else "")
        if refused or state is None:
            self._refuse(layer, refused)
            super().enter(module, args, kwargs, is_compiling=is_compiling)
            return None
        if self.running.tokens:
            self._warn_abandoned(self.running.tokens[-1].call.fqn, layer.fqn)
            self.leave_all()
        self._enter_segment(module, layer, args, kwargs, state)
        return None

    def _state_of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StateOfCall:
        state = self._states.get(module)
        if state is None:
            state = self._states[module] = LayerState(module)
        return state.now(objects_in((args, kwargs), self._kinds))

    def _refuse(self, layer: Layer, reason: str) -> None:
        """Record, and say once, that a call of *layer* does not run again."""
        self.refused = reason
        self._say_once(f"layer {layer.fqn!r} does not run again: {reason}", reason)

    def _enter_segment(
        self,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateOfCall,
    ) -> None:
        call = None
        draws = ExclusiveDraws()
        try:
            self._here.draws = draws
            draws.start()
            call = self.engine.forward_start(
                layer,
                is_last_run=self.running.count_run(layer),
                shared=shared_inputs(args, kwargs),
                frozen_shapes=self._frozen_shapes(module),
                reason_not_traceable=lambda: RUNS_AGAIN,
            )
            segment = self._segment_for(call, args, kwargs)
            attention = self._attention_of(layer, args, kwargs) if self.saves_attention else None
            segment.add(call, self._record(segment, module, layer, args, kwargs, state), attention)
            hook = pack_hook(segment.pack, call)
            self._here.entered = segment
            self.running.enter(Token(module, call, hook, False))
            push_hooks(hook, unpack)
            if attention is not None:
                self._here.attention = attention
                attention.start()
        except BaseException:
            self.leave_all()
            if call is not None:
                self.engine.abort(call)
            raise

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Note what *module*'s layer returns. *outputs* is None on failure."""
        if self._here.is_running_again:
            return
        tokens = self.running.tokens
        is_meant = bool(tokens) and tokens[-1].module is module
        segment = self._here.entered if is_meant else None
        attention = self._here.attention if is_meant else None
        if attention is not None:
            self._stop_attention()
        if segment is None:
            super().leave(module, outputs, is_checkpointed=is_checkpointed)
            return
        self._stop_draws()
        is_to_go_on = False
        try:
            if outputs is not None:
                is_to_go_on = self._end_call(segment, module, outputs)
        except BaseException:
            self.leave_all()
            raise
        super().leave(module, outputs, is_checkpointed=is_checkpointed)
        self._here.entered = None
        if outputs is not None:
            self._look_for_attention(attention)
            self._here.segment = weakref.ref(segment) if is_to_go_on else None

    def _end_call(self, segment: Segment, module: nn.Module, outputs: Any) -> bool:
        """End the segment's newest call; say whether the segment may go on."""
        reason = segment.layer_ended(list(tensors_in(outputs)))
        if not reason:
            return segment.has_saved
        layer = self._layers[module]
        if reason == CHANGES_INPUT or layer in self._refused_late:
            self._refusals[module] = reason
            self._refuse(layer, reason)
        else:
            # What has changed is copied from the next call on.
            self._refused_late.add(layer)
            self._say_once(f"layer {layer.fqn!r} does not run again this time: {reason}", reason)
        return False

    def _stop_draws(self) -> None:
        draws, self._here.draws = self._here.draws, None
        if draws is not None:
            draws.stop()

    def leave_all(self) -> None:
        """Take down what an interrupted forward left behind on this thread."""
        here = self._here
        here.entered = here.segment = None
        self._stop_attention()
        self._stop_draws()
        super().leave_all()

    # ---- attention -----------------------------------------------------------------------------

    def _attention_of(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SeenAttention:
        """Return what sees the kernels of a call of *layer*.

        What they return leaves where the host has room for it beside the inputs of the segments
        that are still to come in this forward.
        """
        hidden = _hidden_states(args, kwargs)
        assert hidden is not None
        num_segments = -(-(len(self._layers) - layer.index - 1) // max(1, self.length))
        reserved_bytes = num_segments * hidden.nbytes
        link = self.engine.link
        return SeenAttention(
            self._keeper.rules, lambda nbytes: link.has_room(nbytes + reserved_bytes)
        )

    def _stop_attention(self) -> None:
        """See no more kernels. It may be called again, also where it was interrupted."""
        attention = self._here.attention
        if attention is not None:
            attention.stop()
            self._here.attention = None

    def _look_for_attention(self, attention: SeenAttention | None) -> None:
        """Say so where the layers run no kernel that is known."""
        if attention is None or self._has_seen_attention:
            return
        if attention.calls:
            self._has_seen_attention = True
        else:
            self._say_once(
                "save_attention finds no attention kernel (written out as in 'eager', torch's own "
                "formula, or another library's), so that attention is computed again too"
            )

    # ---- segments ------------------------------------------------------------------------------

    def _segment_for(
        self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Segment:
        """Return the segment of *call*: the newest one, if it may go on; or a new one."""
        hidden = _hidden_states(args, kwargs)
        assert hidden is not None
        ref = self._here.segment
        segment = None if ref is None else ref()
        if (
            segment is not None
            and len(segment.calls) < self.length
            and segment.tape is call.tape
            and segment.made_by(hidden, last_only=True) is not None
        ):
            return segment
        devices = devices_of((args, kwargs))
        return Segment(
            call,
            hidden,
            self._keeper,
            self.filled,
            devices,
            self._running_again,
            is_nested=self.is_nested,
            check=self._second_runs.of_forward(call.tape.number),
        )

    def _record(
        self,
        segment: Segment,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateOfCall,
    ) -> RecordedCall:
        """Return what *module* needs to run again with these arguments."""
        hidden = None if segment.calls else _hidden_states(args, kwargs)

        def stand_in(tensor: Tensor) -> SegmentInput | MadeBefore | Held:
            if tensor is hidden:
                return SegmentInput()
            return segment.made_by(tensor) or hold(tensor)

        return RecordedCall(
            module,
            layer.fqn,
            noted(args, stand_in),
            noted(kwargs, stand_in),
            InnerHooks(module, self._is_ours),
            state,
            devices_of((args, kwargs)),
        )

    def _is_ours(self, hook: object) -> bool:
        return isinstance(hook, ModelHook) and hook.lifecycle is self

    @contextlib.contextmanager
    def _running_again(self, layer: str) -> Iterator[None]:
        here = self._here
        before = here.is_running_again
        here.is_running_again = True
        try:
            with self._second_runs.watch(layer):
                yield
        finally:
            here.is_running_again = before

    def _say_once(self, sentence: str, cause: str = "") -> None:
        """Log *sentence*, if nothing was said yet of *cause* (of the same sentence, if empty)."""
        cause = cause or sentence
        if cause not in self._said:
            self._said.add(cause)
            if self._is_asked_for:
                logger.warning("checkpoint_every=%d: %s.", self.length, sentence)
            else:
                logger.info("policy 'auto': %s.", sentence)


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a layer works on: the first argument, or what has that name, or comes first."""
    own = args[0] if args else kwargs.get("hidden_states")
    if isinstance(own, Tensor):
        return own
    if args:
        return None
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def _reason_to_refuse(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_compiling: bool
) -> str | None:
    """Say why a layer cannot run again; None if it can."""
    if is_compiling or any(is_compiled(child) for child in module.modules()):
        return f"{COMPILED} saves what it was compiled to save"
    if _hidden_states(args, kwargs) is None:
        return "its first argument is no tensor"
    may_keep = getattr(module, "_can_checkpoint_with_cache", False)
    for name, value in (*enumerate(args), *kwargs.items()):
        why = why_not_noted(value)
        if why and not (may_keep and name in _CACHES):
            advice = "; call the model with use_cache=False to change that"
            return (
                f"argument {name!r} looks like a cache (it has `update`) and {why}"
                f"{advice if name in _CACHES else ''}"
            )
    return None
