"""Module hooks that drive the engine. The only place that registers any.

Three kinds of hooks are installed: on the stack (the module that runs all layers), to see where a
forward begins; on each layer, to switch its saved-tensor hooks on and off; on each sub-module of a
layer, to know who is running when a tensor is saved.

[Note: Entering and leaving]
A layer's hooks are a pre-forward and a post-forward hook (``always_call``). The post-forward hook
does not run on KeyboardInterrupt, and runs without its partner if an earlier pre-forward hook
raised. Hence a stack of tokens per thread: leaving without a token does nothing, and whatever was
left behind is taken down when the next forward begins (or when the offloader is detached).

[Note: Checkpointing]
transformers checkpoints a layer inside ``forward`` since 5.23, so that our hooks sit outside and
only the layer's inputs are saved. Before, it checkpointed ``__call__``: our hooks would run inside
and catch what the checkpoint means to drop. There the checkpointing function itself is wrapped, so
that the layer is entered outside it. Hooks that find a checkpoint on top of the saved-tensor stack,
or that run inside a backward pass (recomputation), do nothing.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.equal_casts import casts_its_input
from hf_pyao.runtime.hook_stack import is_inside_checkpoint, pop_hooks
from hf_pyao.runtime.hooks import (
    CheckpointFunction,
    EnterHook,
    LeaveHook,
    PathEndHook,
    PathStartHook,
    StackHook,
)
from hf_pyao.runtime.layer_inputs import shared_inputs, tensors_in
from hf_pyao.runtime.parameters import FrozenShapes
from hf_pyao.runtime.recompute import COMPILED, ZERO_3
from hf_pyao.runtime.tape import Layer, LayerCall

logger = logging.getLogger(__name__)


class Token:
    """One layer that this thread is inside of."""

    __slots__ = ("call", "is_checkpointed", "module", "pack")

    def __init__(
        self, module: nn.Module, call: LayerCall, pack: Callable[..., Any], is_checkpointed: bool
    ) -> None:
        self.module = module
        self.call = call
        self.pack = pack
        self.is_checkpointed = is_checkpointed


class Running(threading.local):
    """The layers that the calling thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []


class Lifecycle:
    """Installs hooks on a model's layers and drives *engine* with them.

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
        self._handles: list[Any] = []
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._may_checkpoint: list[weakref.ref[nn.Module]] = []
        self._layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._stack = weakref.ref(stack)
        first_kept = len(layers) - keep_last_layers
        for index, (fqn, module) in enumerate(layers):
            self._layers[module] = Layer(index, fqn, is_last=index >= first_kept)
        self._calls_per_forward: dict[int, int] = {}
        self._calls_last_forward: dict[int, int] = {}
        self._num_packs_seen = -1
        self._has_warned_abandoned = False
        self._pack_uncompiled = uncompiled(engine.pack)
        self._unpack_uncompiled = uncompiled(engine.unpack)
        self._install(stack, [module for _, module in layers], named_submodules)

    # ---- installing ----------------------------------------------------------------------------

    def _install(
        self,
        stack: nn.Module,
        layers: Iterable[nn.Module],
        named_submodules: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]],
    ) -> None:
        self._may_checkpoint = [
            weakref.ref(module)
            for module in stack.modules()
            if hasattr(module, "gradient_checkpointing")
        ]
        register = self._handles.append
        register(stack.register_forward_pre_hook(StackHook(self), prepend=True))
        for layer in layers:
            enter, leave = EnterHook(self), LeaveHook(self)
            register(layer.register_forward_pre_hook(enter, with_kwargs=True))
            register(layer.register_forward_hook(leave, always_call=True))
            if _is_compiled(layer):
                continue
            for path, module in named_submodules(layer):
                if path and module is not layer:
                    start = PathStartHook(self, path, has_cast_input=casts_its_input(module))
                    end = PathEndHook(self)
                    register(module.register_forward_pre_hook(start))
                    register(module.register_forward_hook(end, always_call=True))

    def remove(self) -> None:
        """Take every hook down; the model is as it was before."""
        self.leave_all()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for ref in self._wrapped:
            module = ref()
            wrapper = module.__dict__.get("_gradient_checkpointing_func") if module else None
            if isinstance(wrapper, CheckpointFunction) and module is not None:
                module._gradient_checkpointing_func = wrapper.function  # type: ignore[assignment]
        self._wrapped.clear()

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
            self._wrapped.append(weakref.ref(module))

    # ---- moments -------------------------------------------------------------------------------

    def begin_forward(self, stack: nn.Module) -> None:
        """Note that the stack of layers starts a forward."""
        if stack is not self._stack() or _in_backward():
            return
        self.leave_all()
        self.engine.release_done()
        if stack.training and torch.is_grad_enabled():
            num_packs = self.engine.num_packs
            if num_packs == self._num_packs_seen:
                self.engine.warn_idle()
            self._num_packs_seen = num_packs
            self._calls_last_forward = self._calls_per_forward
            self._calls_per_forward = {}
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
        if not module.training or not torch.is_grad_enabled() or _in_backward():
            return
        layer = self._layers.get(module)
        tokens = self.running.tokens
        if layer is None or is_inside_checkpoint():
            return
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return  # torch.func's transforms cannot do with any
        if tokens:
            if tokens[-1].is_checkpointed and tokens[-1].module is module:
                return
            self._warn_abandoned(tokens[-1].call.fqn, layer.fqn)
            self.leave_all()
        call = self.engine.forward_start(
            layer,
            is_kept=self._is_kept(layer),
            shared=shared_inputs(args, kwargs),
            frozen_shapes=_frozen_shapes(module),
            reason_not_traceable=lambda: _reason_not_traceable(module, is_compiling),
        )
        call.is_compiled = is_compiling  # see [Note: Compiled code]
        pack = functools.partial(self._pack_uncompiled if is_compiling else self.engine.pack, call)
        unpack = self._unpack_uncompiled if is_compiling else self.engine.unpack
        tokens.append(Token(module, call, pack, is_checkpointed))
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Switch the saved-tensor hooks of *module*'s layer off. *outputs* is None on failure."""
        tokens = self.running.tokens
        if not tokens or tokens[-1].module is not module:
            return
        if tokens[-1].is_checkpointed != is_checkpointed:
            return
        token = tokens.pop()
        pop_hooks(token.pack, token.call.fqn)
        if outputs is None:
            self.engine.abort(token.call)
        else:
            self.engine.forward_end(token.call, list(tensors_in(outputs)))

    def leave_all(self) -> None:
        """Take down what an interrupted forward left behind on this thread."""
        tokens = self.running.tokens
        while tokens:
            token = tokens.pop()
            pop_hooks(token.pack, token.call.fqn)
            self.engine.abort(token.call)

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
        count = self._calls_per_forward.get(layer.index, 0) + 1
        self._calls_per_forward[layer.index] = count
        return count >= self._calls_last_forward.get(layer.index, 1)


def _frozen_shapes(module: nn.Module) -> FrozenShapes | None:
    """Return the shapes by which autocast copies of frozen weights are known."""
    return FrozenShapes(module) if torch._C._is_any_autocast_enabled() else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def _reason_not_traceable(module: nn.Module, is_compiling: bool) -> str | None:
    """Say why the operations of a layer cannot be recorded for recomputation; None if they can."""
    if is_compiling or any(_is_compiled(child) for child in module.modules()):
        return COMPILED
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return ZERO_3
    return None
