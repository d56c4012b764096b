"""Module hooks that drive the engine. The only place that registers any.

Three kinds of hooks are installed: on the stack (the module that runs all layers), to see where a
forward begins; on each layer, to switch its saved-tensor hooks on and off; on each sub-module of a
layer, to know who is running when a tensor is saved.

[Note: Entering and leaving]
A layer's hooks are a pre-forward and a post-forward hook (``always_call``). The post-forward hook
does not run on KeyboardInterrupt, and runs without its partner if an earlier pre-forward hook
raised. So what is put on for a layer is noted before it is put on (:class:`Inside`), and leaving
another layer than that does nothing. A forward that failed or was interrupted is thrown away when
the next one begins, or when the offloader is detached: all that it made hangs on its tape. Only
torch's own stacks are put right by hand, see [Note: Interrupts] in ``torch_stacks``.

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
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_pyao.engine.rerun.modes import reason_of_dispatch_modes
from hf_pyao.engine.runtime.engine import OffloadEngine
from hf_pyao.engine.runtime.equal_casts import casts_its_input
from hf_pyao.engine.runtime.model_hooks import (
    BeginHook,
    CheckpointFunction,
    EnterHook,
    LeaveHook,
    PathEndHook,
    PathStartHook,
    take_off,
    take_off_inert,
)
from hf_pyao.engine.runtime.parameters import FrozenShapes
from hf_pyao.engine.runtime.sharding import Sharding
from hf_pyao.engine.runtime.tape import Layer, LayerCall
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.torch_hooks.layer_inputs import shared_inputs, tensors_in
from hf_pyao.engine.torch_hooks.passing_over import (
    explain_failure,
    is_recomputing,
    reason_to_pass_over,
)
from hf_pyao.engine.torch_hooks.saved_tensor_hooks import (
    Pack,
    pack_hook,
    pop_hooks,
    push_hooks,
)
from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.errors import warn
from hf_pyao.training_engines import is_compiled

logger = logging.getLogger(__name__)

OTHER_THREAD = "a micro-batch of another thread was under way"

COMPILED = "compiled code"
"""Why a layer cannot be traced."""


def do_nothing() -> None:
    """Do nothing before a forward."""


Hooks = tuple[Callable[[LayerCall, torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What takes over a tensor that a layer call saves, and what gives it back."""


class Way(NamedTuple):
    """How a layer call is served."""

    reason_not_traceable: Callable[[], str | None]
    """Says why its operations cannot be seen."""
    hooks_for: Callable[[LayerCall], Hooks]


@dataclass(slots=True)
class Inside:
    """The layer that the thread is inside of; what is None was not put on yet."""

    module: nn.Module
    is_checkpointed: bool
    call: LayerCall | None = None
    pack: Pack | None = None


class Running:
    """State of the thread that is served; there is one at a time."""

    def __init__(self) -> None:
        self._thread = 0
        """The thread that is served; 0 before the first."""
        self._is_in_forward = False
        """True from the beginning of its forward until the last layer ends."""
        self._passed_over: set[int] = set()
        """Threads whose forward began while another one was served."""
        self._lock = threading.Lock()
        self._inside: Inside | None = None

    @property
    def inside(self) -> Inside | None:
        """The layer that the calling thread is inside of."""
        return self._inside if get_ident() == self._thread else None

    @property
    def call(self) -> LayerCall | None:
        """The call of that layer."""
        inside = self._inside
        return None if inside is None or get_ident() != self._thread else inside.call

    @property
    def is_served(self) -> bool:
        """True on the thread that is served."""
        return get_ident() == self._thread

    def serve(self, *, begins: bool, is_under_way: Callable[[], bool]) -> bool:
        """Serve the calling thread from here on, if no other one is; say whether it is served.

        Code that runs inside of a backward pass, on a thread of autograd's, is always served.

        Args:
            begins: the thread begins a forward. One that was passed over is to its end.
            is_under_way: says whether a forward that has ended still waits for its backward.
        """
        here = get_ident()
        with self._lock:
            if begins:
                self._passed_over.discard(here)
            if here != self._thread and not is_in_backward():
                is_busy = self._is_in_forward or self._inside or is_under_way()
                if here in self._passed_over or (is_busy and _is_alive(self._thread)):
                    self._passed_over.add(here)
                    return False
                self._inside = None  # of a thread that ended inside of a layer
            self._thread = here
            self._is_in_forward = True
            return True

    def enter(self, module: nn.Module, *, is_checkpointed: bool) -> Inside:
        """Note that the thread enters a layer; return the note."""
        self._inside = Inside(module, is_checkpointed)
        return self._inside

    def leave(self, *, ends_forward: bool) -> None:
        """Note that the thread has left the layer; *ends_forward*: it was the last, or failed."""
        self._inside = None
        if ends_forward:
            self._is_in_forward = False


class Lifecycle:
    """Drives *engine* with hooks on a model's layers, from :meth:`install` until :meth:`remove`.

    Args:
        engine: receives ``begin_forward``, ``forward_start``, ``forward_end``, ``abort``.
        stack: module whose forward runs all layers.
        layers: qualified name and module of each layer, in forward order.
        named_submodules: yields path and module for everything inside a layer; the layer is "".
        sharding: what data-parallel engines do to parameters.
        before_forward: called as a forward begins, before anything is decided for it.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        stack: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        named_submodules: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]],
        sharding: Sharding | None = None,
        before_forward: Callable[[], None] = do_nothing,
    ) -> None:
        self.engine = engine
        self._before_forward = before_forward
        self.owner: Any = None
        """What :meth:`install` was given; found again through the stack's hook."""
        self.running = Running()
        self._is_removed = False
        self._named_submodules = named_submodules
        self._layers: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
        self._stack = weakref.ref(stack)
        self._sharding = sharding or Sharding()
        for index, (fqn, module) in enumerate(layers):
            self._layers[module] = Layer(index, fqn)
        self._modules = [
            weakref.ref(module)
            for module in dict.fromkeys(m for m in (stack, *self._layers) for m in m.modules())
        ]
        """All that may get a hook. Which have one is looked up there: see [Note: Interrupts]."""
        self._may_checkpoint = [
            ref for ref in self._modules if hasattr(ref(), "gradient_checkpointing")
        ]
        self._has_warned_abandoned = False
        self._has_warned_thread = False
        self._pack_uncompiled = uncompiled(engine.pack)
        self._unpack_uncompiled = uncompiled(engine.unpack)

    def saved_in(self) -> dict[str, frozenset[str]]:
        """Return, by layer, the sub-modules in which its newest calls saved something."""
        return {
            layer.fqn: frozenset(
                entry.slot.path for is_last in (True, False) for entry in layer.entries(is_last)
            )
            for layer in list(self._layers.values())
        }

    @property
    def refused(self) -> str:
        """Why a layer did not run again, where it should have; empty if none was refused."""
        return ""

    # ---- installing ----------------------------------------------------------------------------

    def install(self, owner: object = None) -> None:
        """Put the hooks on. If it raises, :meth:`remove` takes down what was put on so far.

        The hooks keep *owner* alive, and lead to it.
        """
        self.owner = owner
        stack = self._stack()
        if stack is None:
            return
        for ref in self._modules:
            if (module := ref()) is not None:
                take_off_inert(module)
        stack.register_forward_pre_hook(BeginHook(self), prepend=True)
        for layer in list(self._layers):
            layer.register_forward_pre_hook(EnterHook(self), with_kwargs=True)
            layer.register_forward_hook(LeaveHook(self), always_call=True)
            if is_compiled(layer):
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
        # What notes a module's state may hold the hooks: [Note: Who owns whom] in `weak_calls`.
        self.owner = None

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
        if self._is_to_enter(stack) and not self.serves(stack, begins=True):
            return
        self.leave_all()
        self._before_forward()
        self.engine.link.release_done()
        weights = self.engine.weights
        if weights is not None:
            weights.begin_forward(trains=torch.is_grad_enabled())
        if self.engine.rests:
            self.engine.end_forward()  # of the time before
            self.running.leave(ends_forward=True)
        elif self._is_to_enter(stack):
            if self.engine.has_packed_nothing:
                self.engine.warn_idle()
            self._wrap_checkpointing()
            self.engine.begin_forward()
        elif torch.is_grad_enabled() and not self.engine.num_layer_calls:
            self.engine.idle_warnings.eval_mode()

    def begin_compiled(self, stack: nn.Module) -> None:
        """Note that the stack of layers starts a forward in compiled code.

        Raises:
            ConflictError: weights are streamed.
        """
        self._check_compiled()
        self.begin_forward(stack)

    def _check_compiled(self) -> None:
        if self.engine.weights is not None and not self._is_removed:
            self.engine.weights.refuse_compiled()

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
        if is_compiling:
            self._check_compiled()
        layer = self._layers.get(module)
        if layer is None or self._is_removed or self.engine.rests:
            return
        if not (self._is_to_enter(module) and self.serves(module)):
            return
        reason = reason_to_pass_over()
        if reason is not None:
            self._pass_over(layer, reason)
            return
        outer = self.running.inside
        if outer is not None:
            if outer.is_checkpointed and outer.module is module:
                return
            self._warn_abandoned(self._layers[outer.module].fqn, layer.fqn)
            self.leave_all()
        way = self._way_of(module, layer, args, kwargs, is_compiling=is_compiling)
        inside = self.running.enter(module, is_checkpointed=is_checkpointed)
        inside.call = call = self.engine.forward_start(
            layer,
            shared=shared_inputs(args, kwargs),
            frozen_shapes=self._frozen_shapes(module),
            reason_not_traceable=way.reason_not_traceable,
            is_compiled=is_compiling,  # see [Note: Compiled code]
        )
        pack, unpack = way.hooks_for(call)
        inside.pack = pack_hook(pack, call)
        push_hooks(inside.pack, unpack)

    def _pass_over(self, layer: Layer, reason: str) -> None:
        """Leave the hooks off in a call of *layer*."""
        self.engine.note_passed_over(reason)

    def _way_of(
        self,
        module: nn.Module,
        layer: Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_compiling: bool,
    ) -> Way:
        """Return in which way a call of *layer* is served, which begins."""

        def hooks_for(call: LayerCall) -> Hooks:
            if is_compiling:
                return self._pack_uncompiled, self._unpack_uncompiled
            return self.engine.pack_of(call), self.engine.unpack_hook

        return Way(lambda: self._reason_not_traceable(module, is_compiling), hooks_for)

    def serves(self, module: nn.Module, *, begins: bool = False) -> bool:
        """Say whether the calling thread is served; another one's micro-batch may be under way.

        Args:
            module: the stack, or a layer, that the thread enters.
            begins: it begins a forward, as a call of the first layer does.
        """
        was_served = self.running.is_served
        layer = self._layers.get(module)
        begins = begins or (layer is not None and layer.index == 0)
        if was_served and not begins:
            return True
        if self.running.serve(begins=begins, is_under_way=lambda: self.engine.is_under_way):
            if not (was_served or is_in_backward()):
                self.engine.end_forward()  # of the thread before
            return True
        self.engine.note_passed_over(OTHER_THREAD)
        if not self._has_warned_thread:
            self._has_warned_thread = True
            warn(
                logger,
                "second-thread",
                "thread %r enters the model while a micro-batch of another thread is under way: "
                "nothing that it saves is moved or computed again. Run one micro-batch after the "
                "other, or give each thread a model of its own.",
                threading.current_thread().name,
            )
        return False

    def _is_to_enter(self, module: nn.Module) -> bool:
        """Say whether what *module* saves is the engine's: in evaluation, only streamed weights."""
        is_meant = module.training or self.engine.weights is not None
        return is_meant and torch.is_grad_enabled()

    def leave(self, module: nn.Module, outputs: Any, *, is_checkpointed: bool = False) -> None:
        """Switch the saved-tensor hooks of *module*'s layer off. *outputs* is None on failure."""
        inside = self.running.inside
        if inside is None or inside.module is not module:
            return
        if inside.is_checkpointed != is_checkpointed:
            return
        layer, call, pack = self._layers[module], inside.call, inside.pack
        if outputs is None or call is None or pack is None:
            explain_failure(sys.exc_info()[1], layer.fqn)
            self.leave_all()
            return
        try:
            self._layer_ends(module, outputs)
            pop_hooks(pack, layer.fqn)
            self.engine.forward_end(call, list(tensors_in(outputs)))
            self.running.leave(ends_forward=layer.index == len(self._layers) - 1)
        except Exception:
            self.leave_all()
            raise

    def _layer_ends(self, module: nn.Module, outputs: Any) -> None:
        """Hear what *module*'s layer returns, before its hooks are switched off."""

    def leave_all(self) -> None:
        """Take down what an interrupted forward of this thread left behind."""
        inside = self.running.inside
        if inside is not None:
            if inside.pack is not None:
                pop_hooks(inside.pack, self._layers[inside.module].fqn)
            self.engine.abort()
            self.running.leave(ends_forward=True)

    def give_up(self, since: int) -> None:
        """Take down all that this thread's forwards from number *since* on, which failed, left."""
        self.leave_all()
        self.engine.give_up(since)

    def _warn_abandoned(self, outer: str, inner: str) -> None:
        """Warn, once, that a layer is entered while another has not ended."""
        if not self._has_warned_abandoned:
            self._has_warned_abandoned = True
            warn(
                logger,
                "layer-inside-layer",
                "layer %r was entered while layer %r had not ended: what the latter saves from "
                "here on stays on the device. If layers of this model call one another, register "
                "a module map that names the outer ones only; after an interrupt, it is harmless.",
                inner,
                outer,
            )

    @property
    def is_inside_layer(self) -> bool:
        """True while this thread is inside of a layer that was entered."""
        return self.running.inside is not None

    def _frozen_shapes(self, module: nn.Module) -> FrozenShapes | None:
        """Return the shapes by which autocast copies of frozen weights are known."""
        if not torch._C._is_any_autocast_enabled():
            return None
        return FrozenShapes(module, self._sharding)

    def _reason_not_traceable(self, module: nn.Module, is_compiling: bool) -> str | None:
        """Say why a layer's operations cannot be recorded for recomputation; None if they can."""
        if is_compiling or any(is_compiled(child) for child in module.modules()):
            return COMPILED
        return reason_of_dispatch_modes() or self._sharding.reason_not_traceable(module)


def _is_alive(thread: int) -> bool:
    return any(each.ident == thread for each in threading.enumerate())
