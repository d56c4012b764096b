"""Module hooks that drive the engine. The only place that registers any.

Three kinds of hooks are installed: on the stack (the module that runs all layers), to see where a
forward begins; on each layer, to switch its saved-tensor hooks on and off; on each sub-module of a
layer, to know who is running when a tensor is saved.

[Note: Entering and leaving]
A layer's hooks are a pre-forward and a post-forward hook (``always_call``). The post-forward hook
does not run on KeyboardInterrupt, and runs without its partner if an earlier pre-forward hook
raised. Hence a stack of tokens per thread: leaving without a token does nothing, and whatever was
left behind is taken down when the next forward begins (or when the offloader is detached). A token
is there before anything is switched on, and goes after everything was switched off; see also
[Note: Interrupts] in ``torch_stacks``.

[Note: Checkpointing]
transformers checkpoints a layer inside ``forward`` since 5.23, so that our hooks sit outside and
only the layer's inputs are saved. Before, it checkpointed ``__call__``: our hooks would run inside
and catch what the checkpoint means to drop. There the checkpointing function itself is wrapped, so
that the layer is entered outside it. Hooks that find a checkpoint on top of the saved-tensor stack,
or that run in a recomputation, do nothing: see ``passing_over``.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.equal_casts import casts_its_input
from hf_pyao.runtime.hook_stack import (
    Pack,
    pack_hook,
    pop_hooks,
    pop_left_behind,
    push_hooks,
)
from hf_pyao.runtime.hooks import (
    CheckpointFunction,
    EnterHook,
    LeaveHook,
    PathEndHook,
    PathStartHook,
    StackHook,
    take_off,
    take_off_inert,
)
from hf_pyao.runtime.layer_inputs import shared_inputs, tensors_in
from hf_pyao.runtime.parameters import FrozenShapes
from hf_pyao.runtime.passing_over import explain_failure, is_recomputing, reason_to_pass_over
from hf_pyao.runtime.recompute import COMPILED, ZERO_3
from hf_pyao.runtime.tape import Layer, LayerCall
from hf_pyao.runtime.tracing import stop_left_behind

logger = logging.getLogger(__name__)


class Token:
    """One layer that this thread is inside of."""

    __slots__ = ("call", "is_checkpointed", "module", "pack")

    def __init__(
        self, module: nn.Module, call: LayerCall, pack: Pack, is_checkpointed: bool
    ) -> None:
        self.module = module
        self.call = call
        self.pack = pack
        self.is_checkpointed = is_checkpointed


class Running(threading.local):
    """What the calling thread is at."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        """The layers that it is inside of, innermost last."""
        self.calls_per_forward: dict[int, int] = {}
        """How often each layer object has run in this forward, by the layer's index."""
        self.calls_last_forward: dict[int, int] = {}
        self.num_packs_seen = -1
        """Tensors that had been packed when its newest forward began."""


class Lifecycle:
    """Drives *engine* with hooks on a model's layers, from :meth:`install` until :meth:`remove`.

    Args:
        engine: receives ``begin_forward``, ``forward_start``, ``forward_end``, ``abort``.
        stack: module whose forward runs all layers.
        layers: qualified name and module of each layer, in forward order.
        named_submodules: yields path and module for everything inside a layer; the layer is "".
        keep_last_layers: how many last layers of each forward keep what they save.
        owner: found again through the stack's hook; kept alive by it.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        stack: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        named_submodules: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]],
        keep_last_layers: int,
        owner: Any = None,
    ) -> None:
        self.engine = engine
        self.owner = owner
        self.running = Running()
        self._is_removed = False
        self._named_submodules = named_submodules
        self._layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._stack = weakref.ref(stack)
        first_kept = len(layers) - keep_last_layers
        for index, (fqn, module) in enumerate(layers):
            self._layers[module] = Layer(index, fqn, is_last=index >= first_kept)
        self._modules = [
            weakref.ref(module)
            for module in dict.fromkeys(m for m in (stack, *self._layers) for m in m.modules())
        ]
        """All that may get a hook. Which have one is looked up there: see [Note: Interrupts]."""
        self._may_checkpoint = [
            ref for ref in self._modules if hasattr(ref(), "gradient_checkpointing")
        ]
        self._has_warned_abandoned = False
        self._pack_uncompiled = uncompiled(engine.pack)
        self._unpack_uncompiled = uncompiled(engine.unpack)

    # ---- installing ----------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks on. If it raises, :meth:`remove` takes down what was put on so far."""
        stack = self._stack()
        if stack is None:
            return
        for ref in self._modules:
            if (module := ref()) is not None:
                take_off_inert(module)
        stack.register_forward_pre_hook(StackHook(self), prepend=True)
        for layer in list(self._layers):
            layer.register_forward_pre_hook(EnterHook(self), with_kwargs=True)
            layer.register_forward_hook(LeaveHook(self), always_call=True)
            if _is_compiled(layer):
                continue
            for path, module in self._named_submodules(layer):
                if path and module is not layer:
                    start = PathStartHook(self, path, has_cast_input=casts_its_input(module))
                    module.register_forward_pre_hook(start)
                    module.register_forward_hook(PathEndHook(self), always_call=True)

    def remove(self) -> None:
        """Take everything down; the model is as it was before.

        It may be called again, also where it was interrupted. The stack's hook goes last: by it the
        rest is found again.
        """
        self._is_removed = True
        self.leave_all()
        for ref in self._may_checkpoint:
            if (module := ref()) is None:
                continue
            wrapper = module.__dict__.get("_gradient_checkpointing_func")
            if isinstance(wrapper, CheckpointFunction) and wrapper.lifecycle is self:
                module._gradient_checkpointing_func = wrapper.function  # type: ignore[assignment]
        for ref in reversed(self._modules):
            module = ref()
            if module is not None:
                take_off(module, self)

    def _wrap_checkpointing(self) -> None:
        """Enter layers outside of the checkpoint where it runs around ``__call__``.

        Looked at before each forward, since checkpointing is switched on and off at any time.
        """
        for ref in self._may_checkpoint:
            module = ref()
            if module is None:
                continue
            function = module.__dict__.get("_gradient_checkpointing_func")
            if function is None or isinstance(function, CheckpointFunction):
                continue
            wrapper = CheckpointFunction(self, function)
            module._gradient_checkpointing_func = wrapper  # type: ignore[assignment]

    # ---- moments -------------------------------------------------------------------------------

    def begin_forward(self, stack: nn.Module) -> None:
        """Note that the stack of layers starts a forward."""
        if self._is_removed:
            self.remove()  # which was interrupted, or the hook would not be there
            return
        if stack is not self._stack() or is_recomputing():
            return
        self.leave_all()
        self.engine.release_done()
        if stack.training and torch.is_grad_enabled():
            running, num_packs = self.running, self.engine.num_packs
            if num_packs == running.num_packs_seen:
                self.engine.warn_idle()
            running.num_packs_seen = num_packs
            running.calls_last_forward = running.calls_per_forward
            running.calls_per_forward = {}
            self._wrap_checkpointing()
            self.engine.begin_forward()
        elif torch.is_grad_enabled() and not self.engine.num_layer_calls:
            self.engine.idle_warnings.eval_mode()

    def enter(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_checkpointed: bool = False,
        is_compiling: bool = False,
    ) -> None:
        """Switch the saved-tensor hooks of *module*'s layer on."""
        if not module.training or not torch.is_grad_enabled():
            return
        layer = self._layers.get(module)
        tokens = self.running.tokens
        if layer is None or self._is_removed:
            return
        reason = reason_to_pass_over()
        if reason is not None:
            self.engine.passed_over = reason
            return
        if tokens:
            if tokens[-1].is_checkpointed and tokens[-1].module is module:
                return
            self._warn_abandoned(tokens[-1].call.fqn, layer.fqn)
            self.leave_all()
        call = None
        try:
            call = self.engine.forward_start(
                layer,
                is_kept=self._is_kept(layer),
                shared=shared_inputs(args, kwargs),
                frozen_shapes=_frozen_shapes(module),
                reason_not_traceable=lambda: _reason_not_traceable(module, is_compiling),
            )
            call.is_compiled = is_compiling  # see [Note: Compiled code]
            pack = pack_hook(self._pack_uncompiled if is_compiling else self.engine.pack, call)
            tokens.append(Token(module, call, pack, is_checkpointed))
            push_hooks(pack, self._unpack_uncompiled if is_compiling else self.engine.unpack)
        except BaseException:
            self.leave_all()
            if call is not None:
                self.engine.abort(call)
            raise

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Switch the saved-tensor hooks of *module*'s layer off. *outputs* is None on failure."""
        tokens = self.running.tokens
        if not tokens or tokens[-1].module is not module:
            return
        if tokens[-1].is_checkpointed != is_checkpointed:
            return
        token = tokens[-1]
        try:
            if outputs is None:
                explain_failure(sys.exc_info()[1], token.call.fqn)
                self.leave_all()
            else:
                pop_hooks(token.pack, token.call.fqn)
                self.engine.forward_end(token.call, list(tensors_in(outputs)))
                tokens.pop()
        except BaseException:
            self.leave_all()
            raise

    def leave_all(self) -> None:
        """Take down what an interrupted forward left behind on this thread."""
        tokens = self.running.tokens
        while tokens:
            token = tokens[-1]
            pop_hooks(token.pack, token.call.fqn)
            self.engine.abort(token.call)
            if tokens and tokens[-1] is token:
                tokens.pop()

    def _warn_abandoned(self, outer: str, inner: str) -> None:
        """Warn, once, that a layer is entered while another has not ended."""
        if not self._has_warned_abandoned:
            self._has_warned_abandoned = True
            logger.warning(
                "layer %r was entered while layer %r had not ended: what the latter saves from "
                "here on stays on the device. If layers of this model call one another, register "
                "a module map that names the outer ones only; after an interrupt, it is harmless.",
                inner,
                outer,
            )

    @property
    def is_inside_layer(self) -> bool:
        """True while this thread is inside of a layer that was entered."""
        return bool(self.running.tokens)

    def _is_kept(self, layer: Layer) -> bool:
        """Say whether this is a last layer call of the forward.

        A layer object that runs several times in a forward is last the last time only; how often
        it runs is known from the forward before.
        """
        if not layer.is_last:
            return False
        running = self.running
        count = running.calls_per_forward.get(layer.index, 0) + 1
        running.calls_per_forward[layer.index] = count
        return count >= running.calls_last_forward.get(layer.index, 1)


def clear_thread() -> None:
    """Take down what an interrupt left on this thread of any model's; no layer may be running."""
    pop_left_behind()
    stop_left_behind()


def _frozen_shapes(module: nn.Module) -> FrozenShapes | None:
    """Return the shapes by which autocast copies of frozen weights are known."""
    return FrozenShapes(module) if torch._C._is_any_autocast_enabled() else None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def _reason_not_traceable(module: nn.Module, is_compiling: bool) -> str | None:
    """Say why the operations of a layer cannot be recorded for recomputation; None if they can."""
    if is_compiling or any(_is_compiled(child) for child in module.modules()):
        return COMPILED
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return ZERO_3
    return None
