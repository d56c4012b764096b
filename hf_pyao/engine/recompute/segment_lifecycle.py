"""Hooks that put the layers of a model into segments: see [Note: Segments] in ``segments``.

A layer is entered as without segments, so that tape, policies and reports see a call of it. Of the
calls of one segment, the first saves one tensor, the others none. The model's own loop calls the
layers. The package does not see what the loop does between two layers, so a segment goes on only if
a layer gets, unchanged, the very tensor that the layer before has returned.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.recompute.kept_attention import SeenAttention
from hf_pyao.engine.recompute.segment_admission import Admission, hidden_states_of
from hf_pyao.engine.recompute.segment_calls import RecordedCall
from hf_pyao.engine.recompute.segment_keeper import Keeper
from hf_pyao.engine.recompute.segments import FINAL, FilledSegments, Segment
from hf_pyao.engine.recompute.verification import SEGMENT, SecondRuns
from hf_pyao.engine.rerun.module_state import StateOfCall
from hf_pyao.engine.runtime.lifecycle import Hooks, Lifecycle, Way
from hf_pyao.engine.runtime.model_hooks import ModelHook
from hf_pyao.engine.runtime.tape import Layer, LayerCall
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import CHECKPOINTED
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

    @property
    def run_once(self) -> Collection[str]:
        """Why layers do not run again: a reason for each that does not."""
        return self._admission.run_once.values()

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
    ) -> None:
        """Let *module*'s layer join a segment, or begin one.

        Raises:
            ConflictError: it runs inside the checkpointing of others.
        """
        if not self._here.is_running_again:
            super().enter(
                module, args, kwargs, is_checkpointed=is_checkpointed, is_compiling=is_compiling
            )

    def _pass_over(self, layer: Layer, reason: str) -> None:
        is_others = reason == CHECKPOINTED and torch._C._current_graph_task_id() == -1
        if is_others and self.length and self._is_asked_for:
            what = f"layer {layer.fqn!r} runs in a checkpoint"
            raise ConflictError(
                OTHER_CHECKPOINTING.format(what=what, length=self.length),
                key="other-checkpointing",
            )
        super()._pass_over(layer, reason)

    def _way_of(
        self,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_compiling: bool,
    ) -> Way:
        state = None
        is_asked = self.length and self.engine.policy.runs_again(layer.index)
        if is_asked and module.training:
            state = self._admission.admit(module, layer, args, kwargs, is_compiling=is_compiling)
        if state is None:
            return super()._way_of(module, layer, args, kwargs, is_compiling=is_compiling)
        return Way(
            lambda: RUNS_AGAIN,
            functools.partial(self._join, module=module, args=args, kwargs=kwargs, state=state),
        )

    def _join(
        self,
        call: LayerCall,
        *,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: StateOfCall,
    ) -> Hooks:
        """Put *call* into a segment; return what takes over what it saves."""
        layer, here = call.layer, self._here
        segment = self._segment_for(call, args, kwargs)
        recorded = RecordedCall(
            module, layer.fqn, args, kwargs, state, segment.stand_in_for, self._is_ours
        )
        here.attention = self._attention_of(layer, args, kwargs) if self.saves_attention else None
        segment.add(call, recorded, here.attention)
        here.entered = segment
        if here.attention is not None:
            here.attention.start()
        return segment.pack, segment.unpack

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Note what *module*'s layer returns. *outputs* is None on failure."""
        if not self._here.is_running_again:
            super().leave(module, outputs, is_checkpointed=is_checkpointed)

    def _layer_ends(self, module: nn.Module, outputs: Any) -> None:
        here = self._here
        segment, attention = here.entered, here.attention
        self._stop_attention()
        here.entered = here.segment = None
        if segment is None:
            return
        reason = segment.layer_ended(list(tensors_in(outputs)))
        if reason:
            is_final = reason in FINAL
            self._admission.refuse_late(module, self._layers[module], reason, is_final=is_final)
        elif segment.has_saved:
            here.segment = weakref.ref(segment)
        self._look_for_attention(attention)

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
        self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]
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
