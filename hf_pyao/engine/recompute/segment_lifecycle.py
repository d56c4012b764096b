"""Hooks that put the layers of a model into segments: see [Note: Segments] in ``segments``.

A layer is entered as without segments, so that tape, policies and reports see a call of it. Of the
calls of one segment, the first saves one tensor, the others none. The model's own loop calls the
layers. The package does not see what the loop does between two layers, so a segment goes on only if
a layer gets, unchanged, the very tensor that the layer before has returned.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.recompute.kept_attention import SeenAttention
from hf_pyao.engine.recompute.second_run import FilledSegments, unpack
from hf_pyao.engine.recompute.segment_admission import Admission, hidden_states_of
from hf_pyao.engine.recompute.segment_calls import devices_of, record_call
from hf_pyao.engine.recompute.segment_keeper import Keeper
from hf_pyao.engine.recompute.segments import FINAL, Segment
from hf_pyao.engine.recompute.verification import SEGMENT, SecondRuns
from hf_pyao.engine.rerun.module_state import StateOfCall
from hf_pyao.engine.runtime.lifecycle import Lifecycle
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.runtime.running import Token
from hf_pyao.engine.runtime.tape import Layer, LayerCall
from hf_pyao.engine.torch_hooks.layer_inputs import shared_inputs, tensors_in
from hf_pyao.engine.torch_hooks.passing_over import CHECKPOINTED, reason_to_pass_over
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import pack_hook, push_hooks
from hf_pyao.engine.weak_calls import weakly
from hf_pyao.errors import ConflictError, warn

logger = logging.getLogger(__name__)

RUNS_AGAIN = "its layer runs again as a whole"
"""Why nothing of a layer in a segment is recomputed by itself."""

OTHER_CHECKPOINTING = (
    "{what}, and checkpoint_every is {length}: the layers would run again twice. Switch the other "
    "checkpointing off (gradient_checkpointing=False, activation_checkpointing=False from "
    "transformers 5.23 on; no checkpoint_wrapper around layers), or give checkpoint_every=0."
)
"""Of an error."""


class _Here(threading.local):
    """State of the calling thread."""

    segment: weakref.ref[Segment] | None = None
    """That of the newest layer call. The graph alone keeps it."""
    entered: Segment | None = None
    """That of the layer that runs."""
    attention: SeenAttention | None = None
    """What sees its kernels of attention."""
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
        self._keeper = Keeper(self.engine)
        self._here = _Here()
        self._admission = Admission(weakly(self._say_once, None))
        self._has_looked_for_sharding = False
        self._said: set[str] = set()

    @property
    def refused(self) -> str:
        """Why a layer did not run again, where it should have; empty if none was refused."""
        return self._admission.refused

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
                raise ConflictError(
                    OTHER_CHECKPOINTING.format(what=what, length=self.length),
                    key="other-checkpointing",
                )
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
        """Let *module*'s layer join a segment, or begin one.

        Raises:
            ConflictError: it runs inside the checkpointing of others.
        """
        if self._here.is_running_again:
            return None
        layer = self._layers.get(module)
        is_plain = layer is not None and not self.engine.policy.runs_again(layer.index)
        if not self.length or is_plain:
            return super().enter(
                module, args, kwargs, is_checkpointed=is_checkpointed, is_compiling=is_compiling
            )
        if not module.training:
            return super().enter(module, args, kwargs, is_compiling=is_compiling)
        if not torch.is_grad_enabled():
            return None
        if layer is None or self._is_removed or not self.serves(module):
            return None
        reason = reason_to_pass_over()
        if reason is not None:
            is_others = reason == CHECKPOINTED and torch._C._current_graph_task_id() == -1
            if is_others and self._is_asked_for:
                what = f"layer {layer.fqn!r} runs in a checkpoint"
                raise ConflictError(
                    OTHER_CHECKPOINTING.format(what=what, length=self.length),
                    key="other-checkpointing",
                )
            self.engine.note_passed_over(reason)
            return None
        state = self._admission.admit(module, layer, args, kwargs, is_compiling=is_compiling)
        if state is None:
            super().enter(module, args, kwargs, is_compiling=is_compiling)
            return None
        if self.running.tokens:
            self._warn_abandoned(self.running.tokens[-1].call.fqn, layer.fqn)
            self.leave_all()
        self._enter_segment(module, layer, args, kwargs, state)
        return None

    def _enter_segment(
        self,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateOfCall,
    ) -> None:
        call = None
        try:
            call = self.engine.forward_start(
                layer,
                is_last_run=self.running.count_run(layer),
                shared=shared_inputs(args, kwargs),
                frozen_shapes=self._frozen_shapes(module),
                reason_not_traceable=lambda: RUNS_AGAIN,
            )
            devices = devices_of((args, kwargs))
            segment = self._segment_for(call, args, kwargs, devices)
            attention = self._attention_of(layer, args, kwargs) if self.saves_attention else None
            hidden = None if segment.calls else hidden_states_of(args, kwargs)
            recorded = record_call(
                module,
                layer.fqn,
                args,
                kwargs,
                state,
                hidden,
                segment.made_by,
                self._is_ours,
                devices,
            )
            segment.add(call, recorded, attention)
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
        self._admission.refuse_late(module, self._layers[module], reason, is_final=reason in FINAL)
        return False

    def leave_all(self) -> None:
        """Take down what an interrupted forward left behind on this thread."""
        here = self._here
        here.entered = here.segment = None
        self._stop_attention()
        super().leave_all()

    # ---- attention -----------------------------------------------------------------------------

    def _attention_of(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SeenAttention:
        """Return what sees the kernels of a call of *layer*."""
        hidden = hidden_states_of(args, kwargs)
        assert hidden is not None
        num_segments = -(-(len(self._layers) - layer.index - 1) // max(1, self.length))
        return self._keeper.attention(hidden, num_segments)

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
        self,
        call: LayerCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        devices: tuple[torch.device, ...],
    ) -> Segment:
        """Return the segment of *call*: the newest one, if it may go on; or a new one."""
        hidden = hidden_states_of(args, kwargs)
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
                warn(
                    logger,
                    "layer-not-checkpointed",
                    "checkpoint_every=%d: %s.",
                    self.length,
                    sentence,
                )
            else:
                logger.info("policy 'auto': %s.", sentence)
