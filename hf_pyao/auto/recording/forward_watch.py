"""``ForwardWatch``: is called before a model's forwards; one hook serves all listeners."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._guards import active_fake_mode

from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.seen_forward import SeenForward, seen_forward
from hf_pyao.engine.runtime.model_hooks import ModelHook, take_off
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import is_recomputing
from hf_pyao.model.map.wrappers import unwrap_parallel


class Place(IntEnum):
    """In which order listeners hear of a forward that is about to run."""

    MEASURES = 0
    """Measures: what was measured before this forward is handed on first."""
    DECIDES = 1
    """Decides what this forward runs with."""
    FITS = 2
    """Makes it fit where no plan does: it looks whether there is one."""


BeforeForward: TypeAlias = Callable[..., None]
"""Called before a forward with what was seen of it, and whether it is the first (``is_first``)."""


class _Listener:
    """A watch, and who is told of what it sees."""

    def __init__(self, watch: ForwardWatch, before: BeforeForward, place: Place) -> None:
        self.watch = watch
        self.before = before
        self.place = place
        self.held: object = None
        """What goes with the model, see :meth:`ForwardWatch.hold`."""


class _WatchHook(ModelHook):
    """Pre-forward hook of the model; an owner has one, however many of its parts listen.

    It, and so the model, owns the owner and what is called before each forward. The channel and the
    watches are theirs, and hold neither: see [Note: Who owns whom] in ``weak_calls``.
    """

    def __init__(self, channel: _Channel, owner: object) -> None:
        super().__init__(channel)  # type: ignore[arg-type]
        self.channel = channel
        self._note_uncompiled = uncompiled(channel.note_compiled)
        self.owner = owner
        self.listeners: tuple[_Listener, ...] = ()
        """In order: by place, and the newest first in a place."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Note the call."""
        if kwargs is None:
            return
        if torch.compiler.is_compiling():
            self._note_uncompiled(module, args, kwargs)
            return
        self.channel.note(module, args, kwargs)


class _Channel:
    """What the hook leads to: tells each listener of a forward in training, in order."""

    def __init__(self) -> None:
        self.hook: weakref.ref[_WatchHook] | None = None
        self.newest: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments of the call that is about to run; None between calls."""
        self.is_compiled = False
        """True once the model was called in compiled code."""
        self._lock = threading.Lock()

    def listeners(self) -> tuple[_Listener, ...]:
        """Return who listens now."""
        hook = None if self.hook is None else self.hook()
        return () if hook is None else hook.listeners

    @property
    def owner(self) -> object:
        """Who is to be found by the hook; None once it is off."""
        hook = None if self.hook is None else self.hook()
        return None if hook is None else hook.owner

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a call, if the model is trained."""
        if not module.training or not torch.is_grad_enabled() or is_recomputing():
            return
        if active_fake_mode() is not None:
            return  # a copy's functions lead back to the model
        if not self._lock.acquire(blocking=False):
            return  # another thread's forward is being told of, which may take a while
        try:
            self.newest = (args, kwargs)
            # One that is added meanwhile is called from the next forward on.
            for listener in self.listeners():
                if listener in self.listeners():
                    listener.watch.see(args, kwargs, listener.before)
        finally:
            self.newest = None
            self._lock.release()

    def note_compiled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Tell of a call in compiled code, if the model is trained."""
        self.is_compiled = True
        self.note(module, args, kwargs)


def _hook_of(model: nn.Module, owner: object) -> _WatchHook | None:
    """Return the hook of *owner* on *model*, if there is one."""
    hooks: Iterable[object] = model._forward_pre_hooks.values()
    ours = (hook for hook in hooks if isinstance(hook, _WatchHook))
    return next((hook for hook in ours if hook.owner is owner), None)


class ForwardWatch:
    """Notes what a model's first forward in training is called with, and tells of all of them.

    Args:
        model: what the user calls, or a wrapper around it.
        owner: who is to be found by the hook.
        before: called before each forward in training, until :meth:`remove`.
        place: when it is called, among those who watch the model for the same owner.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: object,
        before: BeforeForward,
        place: Place = Place.DECIDES,
    ) -> None:
        inner = unwrap_parallel(model)
        self._model = weakref.ref(inner)
        self.seen: SeenForward | None = None
        """What it was called with first; None until then."""
        self._largest: SeenForward | None = None
        """What it was called with when that had the most elements, from the first call on."""
        self.most_elements = 0
        """Elements of that call's largest tensor; 0 if only the first one was seen."""
        listener = _Listener(self, before, place)
        hook = _hook_of(inner, owner)
        if hook is not None:
            self._channel = hook.channel
            hook.listeners = tuple(sorted((listener, *hook.listeners), key=lambda each: each.place))
            return
        self._channel = _Channel()
        hook = _WatchHook(self._channel, owner)
        hook.listeners = (listener,)
        self._channel.hook = weakref.ref(hook)
        registered: Any = hook
        inner.register_forward_pre_hook(registered, prepend=True, with_kwargs=True)

    @property
    def is_compiled(self) -> bool:
        """True once the model was called in compiled code."""
        return self._channel.is_compiled

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: BeforeForward) -> None:
        """Note a call, and tell *before* of it."""
        is_first = self.seen is None
        if self.seen is None:
            self.seen = self._largest = seen_forward(args, kwargs)
            self.most_elements = 0
        num_elements = self.num_elements()
        if num_elements > self.most_elements:
            if self.most_elements:
                self._largest = seen_forward(args, kwargs)
            self.most_elements = num_elements
        before(self.seen, is_first=is_first)

    def hold(self, value: object) -> None:
        """Hold *value* as long as the model is there, and this watches it."""
        for listener in self._channel.listeners():
            if listener.watch is self:
                listener.held = value

    def forget(self) -> None:
        """Take the next forward for the first one."""
        self.seen = None

    def num_elements(self) -> int:
        """Return the elements of the largest tensor of the call that is about to run; 0 else."""
        newest = self._channel.newest
        return 0 if newest is None else max((t.numel() for t in tensors_in(newest)), default=0)

    def remove(self) -> None:
        """Tell no more, and let go of what was seen; the last one takes the hook off.

        Twice is fine.
        """
        self.seen = self._largest = None
        hook = None if self._channel.hook is None else self._channel.hook()
        if hook is not None:
            hook.listeners = tuple(each for each in hook.listeners if each.watch is not self)
        model = self._model()
        if model is not None and not self._channel.listeners():
            take_off(model, self._channel)  # type: ignore[arg-type]

    def step(self, *, is_newest: bool = False) -> CopiedStep:
        """Return a step of the model as it was called.

        Args:
            is_newest: as in the call that is about to run, and not as in the first one.

        Raises:
            CopyError: it was not called, or is gone.
        """
        return self.steps(is_newest=is_newest)()

    def newest_sizes(self) -> list[list[int]]:
        """Return the shapes of the tensors of the call that is about to run; none between calls."""
        newest = self._channel.newest
        return [] if newest is None else seen_forward(*newest).sizes()

    def steps(
        self,
        *,
        is_newest: bool = False,
        is_largest: bool = False,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Callable[[], CopiedStep]:
        """Return what makes such a step, now and later, and does not hold the model.

        Args:
            is_newest: as for :meth:`step`.
            is_largest: as in the largest call since the first one.
            sizes: of another process's tensors, as :meth:`newest_sizes` gives them there; the step
                is as in the first call, with tensors of these sizes.
        """
        ref = self._model
        seen = self._largest if is_largest else self.seen
        if is_newest and self._channel.newest is not None:
            seen = seen_forward(*self._channel.newest)
        if sizes is not None and self.seen is not None:
            seen = self.seen.resized(sizes)

        def make() -> CopiedStep:
            model = ref()
            if model is None or seen is None:
                raise CopyError("the model that was attached was not called itself.")
            return CopiedStep(model, seen)

        return make
