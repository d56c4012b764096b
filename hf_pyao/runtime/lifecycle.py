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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_pyao.runtime.compiled import uncompiled
from hf_pyao.runtime.engine import OffloadEngine
from hf_pyao.runtime.parameters import FrozenShapes
from hf_pyao.runtime.recompute import COMPILED, ZERO_3
from hf_pyao.runtime.tape import Layer, LayerCall

logger = logging.getLogger(__name__)

_CHECKPOINT_HOOKS = ("_checkpoint_hook", "_recomputation_hook")


class _Token:
    """One layer that this thread is inside of."""

    __slots__ = ("call", "is_checkpointed", "module", "pack")

    def __init__(
        self, module: nn.Module, call: LayerCall, pack: Callable[..., Any], is_checkpointed: bool
    ) -> None:
        self.module = module
        self.call = call
        self.pack = pack
        self.is_checkpointed = is_checkpointed


class _Thread(threading.local):
    """Tokens of the calling thread, innermost last."""

    def __init__(self) -> None:
        self.tokens: list[_Token] = []


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
        self._thread = _Thread()
        self._handles: list[Any] = []
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._stack = weakref.ref(stack)
        first_kept = len(layers) - keep_last_layers
        for index, (fqn, module) in enumerate(layers):
            self._layers[module] = Layer(index, fqn, is_last=index >= first_kept)
        self._calls_per_forward: dict[int, int] = {}
        self._calls_last_forward: dict[int, int] = {}
        self._num_packs_seen = -1
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
                    start, end = _PathHook(self, path), _PathHook(self, None)
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

    def _wrap_checkpointing(self, stack: nn.Module) -> None:
        """Enter layers outside of the checkpoint where it runs around ``__call__``.

        Looked at before each forward, since checkpointing is switched on and off at any time.
        """
        for module in stack.modules():
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
        if stack.training and torch.is_grad_enabled():
            num_packs = self.engine.num_packs
            if num_packs == self._num_packs_seen:
                self.engine.warn_idle()
            self._num_packs_seen = num_packs
            self._calls_last_forward = self._calls_per_forward
            self._calls_per_forward = {}
            self._wrap_checkpointing(stack)
            self.engine.begin_forward()

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
        tokens = self._thread.tokens
        if layer is None or _is_inside_checkpoint():
            return
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return  # torch.func's transforms cannot do with any
        if tokens:
            if tokens[-1].is_checkpointed and tokens[-1].module is module:
                return
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
        tokens.append(_Token(module, call, pack, is_checkpointed))
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Switch the saved-tensor hooks of *module*'s layer off. *outputs* is None on failure."""
        tokens = self._thread.tokens
        if not tokens or tokens[-1].module is not module:
            return
        if tokens[-1].is_checkpointed != is_checkpointed:
            return
        token = tokens.pop()
        _pop_hooks(token)
        if outputs is None:
            self.engine.abort(token.call)
        else:
            self.engine.forward_end(token.call, list(tensors_in(outputs)))

    def leave_all(self) -> None:
        """Take down what an interrupted forward left behind on this thread."""
        tokens = self._thread.tokens
        while tokens:
            token = tokens.pop()
            _pop_hooks(token)
            self.engine.abort(token.call)

    def path_push(self, path: str) -> None:
        """Note that a sub-module of the current layer starts."""
        if self._thread.tokens:
            self._thread.tokens[-1].call.paths.append(path)

    def path_pop(self) -> None:
        """Note that a sub-module of the current layer ends."""
        if self._thread.tokens:
            paths = self._thread.tokens[-1].call.paths
            if len(paths) > 1:
                paths.pop()

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


# ---- hooks -------------------------------------------------------------------------------------


def _gone(module: nn.Module, *_: Any) -> None:
    """Stand in for a hook in a copy of the model: takes itself off when first called."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook is _gone]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _load_gone() -> Callable[..., None]:
    return _gone


class _Hook:
    """A hook that drives one lifecycle. In a copied or unpickled model it becomes inert."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Leave the copy a plain model."""
        return _gone

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled model a plain one."""
        return _load_gone, ()


class StackHook(_Hook):
    """Pre-forward hook of the stack."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._begin_uncompiled = uncompiled(lifecycle.begin_forward)

    @property
    def owner(self) -> Any:
        """Who installed the hooks."""
        return self.lifecycle.owner

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a forward."""
        if torch.compiler.is_compiling():
            self._begin_uncompiled(module)
        else:
            self.lifecycle.begin_forward(module)


class EnterHook(_Hook):
    """Pre-forward hook of a layer."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._enter_uncompiled = uncompiled(lifecycle.enter)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the layer."""
        if torch.compiler.is_compiling():
            self._enter_uncompiled(module, args, kwargs, is_compiling=True)
        else:
            self.lifecycle.enter(module, args, kwargs)


class LeaveHook(_Hook):
    """Post-forward hook of a layer."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._leave_uncompiled = uncompiled(lifecycle.leave)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the layer."""
        if torch.compiler.is_compiling():
            self._leave_uncompiled(module, output)
        else:
            self.lifecycle.leave(module, output)


class _PathHook(_Hook):
    """Hook of a sub-module: pre-forward with its path, post-forward with None.

    Compiled code passes it by, so that it breaks no graph: slots are then named by layer alone.
    """

    def __init__(self, lifecycle: Lifecycle, path: str | None) -> None:
        super().__init__(lifecycle)
        self.path = path

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Note the start or the end of the sub-module."""
        if torch.compiler.is_compiling():
            return
        if self.path is None:
            self.lifecycle.path_pop()
        else:
            self.lifecycle.path_push(self.path)


class CheckpointFunction:
    """Wraps a model's checkpointing function, to enter the layer outside of the checkpoint."""

    def __init__(self, lifecycle: Lifecycle, function: Callable[..., Any]) -> None:
        self.lifecycle = lifecycle
        self.function = function

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the checkpointing function with the layer entered, if *run* is a layer's call."""
        inner = run.func if isinstance(run, functools.partial) else run
        module = getattr(inner, "__self__", None)
        if not isinstance(module, nn.Module) or self.lifecycle._thread.tokens:
            return self.function(run, *args, **kwargs)
        run_kwargs = run.keywords if isinstance(run, functools.partial) else {}
        self.lifecycle.enter(module, args, run_kwargs, is_checkpointed=True)
        outputs = None
        try:
            outputs = self.function(run, *args, **kwargs)
        finally:
            self.lifecycle.leave(module, outputs, is_checkpointed=True)
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Leave the copy a plain model."""
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled model a plain one."""
        return _identity, (self.function,)


def _identity(value: Any) -> Any:
    return value


# ---- helpers -----------------------------------------------------------------------------------


def shared_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a layer gets beside its hidden states.

    Masks, rotary tables, encoder states: the same for every layer, so that moving one layer's
    would free nothing. The hidden states are the first positional argument, or go by that name, or
    come first.
    """
    rest = dict(kwargs)
    own = args[0] if args else rest.pop("hidden_states", None)
    if own is None:
        own = next((value for value in rest.values() if isinstance(value, torch.Tensor)), None)
    storage = own.untyped_storage()._cdata if type(own) is torch.Tensor else None
    found = list(tensors_in((args[1:], rest)))
    if storage is None:
        return found
    return [
        tensor
        for tensor in found
        if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata != storage
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings (model outputs included)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _frozen_shapes(module: nn.Module) -> FrozenShapes | None:
    """Return the shapes by which autocast copies of frozen weights are known."""
    return FrozenShapes(module) if torch._C._is_any_autocast_enabled() else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_inside_checkpoint() -> bool:
    top = _top_hooks()
    if top is None:
        return False
    return any(name in getattr(top[0], "__qualname__", "") for name in _CHECKPOINT_HOOKS)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def _reason_not_traceable(module: nn.Module, is_compiling: bool) -> str | None:
    """Say why the operations of a layer cannot be recorded for recomputation; None if they can."""
    if is_compiling or any(_is_compiled(child) for child in module.modules()):
        return COMPILED
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        return ZERO_3
    return None


def _top_hooks() -> Any:
    """Return the saved-tensor hooks that would be called now, pack and unpack; None if none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_hooks(token: _Token) -> None:
    """Take *token*'s hooks down, from under others that were left on if need be.

    A checkpoint whose forward failed may leave its own hooks on until its traceback is gone (seen
    in torch 2.9); it takes the topmost down then, which must be its own.
    """
    others = []
    while (top := _top_hooks()) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if top[0] is token.pack:
            break
        others.append(top)
    else:
        logger.warning(
            "the saved-tensor hooks of layer %r were taken down by someone else before it ended.",
            token.call.fqn,
        )
    for pack, unpack in reversed(others):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
