"""The hooks on a model's modules, and the wrapper around its checkpointing function.

Each drives one ``Lifecycle``. In a copied or unpickled model they become inert. Compiled code calls
their guarded twins: see [Note: Compiled code] in ``compile_guard``.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_pyao.engine.runtime.observer import Observer
from hf_pyao.engine.runtime.tape import LayerCall
from hf_pyao.engine.torch_hooks.checkpoint_arguments import hooks_argument
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in

if TYPE_CHECKING:
    from hf_pyao.engine.runtime.lifecycle import Lifecycle


def _gone(module: nn.Module, *_: Any) -> None:
    """Stand in for a hook in a copy of the model: takes itself off when first called."""
    _take_off(module, lambda hook: hook is _gone)


def take_off(module: nn.Module, lifecycle: Lifecycle) -> None:
    """Take the hooks of *lifecycle* off *module*."""
    _take_off(module, lambda hook: isinstance(hook, ModelHook) and hook.lifecycle is lifecycle)


def take_off_inert(module: nn.Module) -> None:
    """Take off what stands for hooks of ours in a copied or unpickled model."""
    _take_off(
        module,
        lambda hook: (
            hook is _gone or isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)
        ),
    )


def _take_off(module: nn.Module, is_meant: Callable[[Any], bool]) -> None:
    """Take hooks off, what torch notes about them first: it may be interrupted, and called again.

    ``RemovableHandle`` would not do: an interrupt may come before we have it.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_meant(hook)]:
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            hooks.pop(key, None)


class ModelHook:
    """A hook that drives one lifecycle. In a copied or unpickled model it becomes inert."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Leave the copy a plain model."""
        return _gone

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled model a plain one, also where hf_pyao is not installed.

        What takes any arguments and does nothing, and comes with Python: a context's exit.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


class BeginHook(ModelHook):
    """Pre-forward hook of the stack."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._begin_uncompiled = uncompiled(lifecycle.begin_compiled)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a forward."""
        if torch.compiler.is_compiling():
            self._begin_uncompiled(module)
        else:
            self.lifecycle.begin_forward(module)


class EnterHook(ModelHook):
    """Pre-forward hook of a layer."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._enter_uncompiled = uncompiled(lifecycle.enter)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Enter the layer; *kwargs* are missing if an interrupt came as this was put on or off."""
        if kwargs is None:
            return
        if torch.compiler.is_compiling():
            self._enter_uncompiled(module, args, kwargs, is_compiling=True)
        else:
            self.lifecycle.enter(module, args, kwargs)


class LeaveHook(ModelHook):
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


class PathStartHook(ModelHook):
    """Pre-forward hook of a sub-module: notes that it runs.

    It runs for every sub-module of every layer, so what it does is written out. Compiled code
    passes it by, so that it breaks no graph: slots are then named by layer alone.
    """

    def __init__(self, lifecycle: Lifecycle, path: str, *, has_cast_input: bool) -> None:
        """Name the sub-module *path*.

        Args:
            lifecycle: knows the layer call that runs.
            path: the sub-module's name in its layer.
            has_cast_input: its input is what autocast would cast for it.
        """
        super().__init__(lifecycle)
        self.path = path
        self._has_cast_input = has_cast_input
        self._running = lifecycle.running

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the start of the sub-module."""
        if torch.compiler.is_compiling():
            return
        call = self._running.call
        if call is not None:
            cast_input = None
            if call.is_autocast and self._has_cast_input and len(args) == 1:
                cast_input = args[0] if isinstance(args[0], Tensor) else None
            call.enter(self.path, cast_input)
            if call.observer is not None:
                _tell(call.observer, call, args, is_start=True)


class PathEndHook(ModelHook):
    """Post-forward hook of a sub-module: notes that its parent runs again."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._running = lifecycle.running

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the end of the sub-module."""
        if torch.compiler.is_compiling():
            return
        call = self._running.call
        if call is not None:
            if call.observer is not None:
                _tell(call.observer, call, output, is_start=False)
            call.leave()


def _tell(observer: Observer, call: LayerCall, value: Any, *, is_start: bool) -> None:
    """Tell that a sub-module starts with *value*, or ends with it.

    Its backward ends, or starts, when a gradient reaches a node that made a tensor in *value*.
    """
    layer, path = call.fqn, call.paths[-1]
    observer.on_module(layer, path, "forward", is_start=is_start)

    def on_gradient(_: Any) -> None:
        observer.on_module(layer, path, "backward", is_start=not is_start)

    for node in {t.grad_fn: None for t in tensors_in(value) if t.grad_fn is not None}:
        node.register_prehook(on_gradient)


class CheckpointFunction:
    """Wraps a model's checkpointing function, to enter the layer outside of the checkpoint."""

    def __init__(self, lifecycle: Lifecycle, function: Callable[..., Any]) -> None:
        self.lifecycle = lifecycle
        self.function = function
        self._call = _with_hooks_argument(function)

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the checkpointing function with the layer entered, if *run* is a layer's call."""
        inner = run.func if isinstance(run, functools.partial) else run
        module = getattr(inner, "__self__", None)
        if not isinstance(module, nn.Module) or self.lifecycle.is_inside_layer:
            return self._call(run, *args, **kwargs)
        run_kwargs = run.keywords if isinstance(run, functools.partial) else {}
        outputs = None
        try:
            self.lifecycle.enter(module, args, run_kwargs, is_checkpointed=True)
            outputs = self._call(run, *args, **kwargs)
        finally:
            self.lifecycle.leave(module, outputs, is_checkpointed=True)
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Leave the copy a plain model."""
        return self.function

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the unpickled model a plain one."""
        return typing.cast, (None, self.function)  # a function that returns its second argument


def _with_hooks_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* so that a checkpoint that asks what to do with hooks around it is told."""
    if not isinstance(function, functools.partial):
        return function
    more = hooks_argument(function.func, function.keywords)
    return functools.partial(function, **more) if more else function
