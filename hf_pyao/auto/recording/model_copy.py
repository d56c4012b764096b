"""A training step of a model that runs, on fake tensors: the same operations, and no memory.

:class:`ForwardWatch` notes what the model is called with; :class:`CopiedStep` runs a fake copy of
the model that way. The model itself is not touched, its weights and its gradients neither, nor the
random numbers of the process. A copy that leads back to the model is not run: one whose functions
hold the model's own modules, say.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hf_pyao.auto.recording.held_interrupts import HeldInterrupts
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.runtime.model_hooks import ModelHook, take_off
from hf_pyao.engine.torch_hooks.compile_guard import uncompiled
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.torch_hooks.passing_over import is_recomputing
from hf_pyao.errors import PyAOError
from hf_pyao.model.map.wrappers import unwrap_parallel
from hf_pyao.plan.hardware.kernel_settings import KernelSettings, settings_of
from hf_pyao.text import describe_error

_HOOKS = (
    *("forward_hooks", "forward_pre_hooks", "forward_hooks_with_kwargs"),
    *("forward_pre_hooks_with_kwargs", "forward_hooks_always_called"),
    *("backward_hooks", "backward_pre_hooks"),
)
"""Tables of a module's hooks; ``_global_`` in front are those of all modules."""


class CopyError(PyAOError, RuntimeError):
    """The model cannot be run on fake tensors; says why."""


@dataclass(frozen=True)
class TensorShape:
    """A tensor without what it holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a tensor of it; integers are zeros, which are indices of something."""
        make = torch.empty if self.dtype.is_floating_point else torch.zeros
        return make(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class SeenForward:
    """What a model's forward was called with."""

    args: tuple[Any, ...]
    """Tensors are :class:`TensorShape`."""
    kwargs: dict[str, Any]
    autocast_dtype: torch.dtype | None
    """What autocast computes in; None if it is off."""
    has_padding: bool
    """True if an attention mask hides something."""

    def shapes(self) -> list[str]:
        """Name the arguments that are tensors: ``"input_ids int64[2, 512]"``."""
        found = []
        for name, value in (*enumerate(self.args), *self.kwargs.items()):
            for leaf in tree_leaves(value):
                if isinstance(leaf, TensorShape):
                    dtype = str(leaf.dtype).removeprefix("torch.")
                    found.append(f"{name} {dtype}{list(leaf.shape)}")
        if self.autocast_dtype is not None:
            found.append(f"autocast {str(self.autocast_dtype).removeprefix('torch.')}")
        return found


class Place(IntEnum):
    """In which order listeners hear of a forward that is about to run."""

    MEASURES = 0
    """Measures: what was measured before this forward is handed on first."""
    DECIDES = 1
    """Decides what this forward runs with."""


class BeforeForward(Protocol):
    """Is told of a forward that is about to run."""

    def __call__(self, seen: SeenForward, *, is_first: bool) -> None:
        """Hear of it; *seen* is what the first one was called with."""
        ...


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
            for listener in self.listeners():  # one that comes now hears of the next forward
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
        self._most_elements = 0
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
            self._most_elements = 0
        num_elements = self.num_elements()
        if num_elements > self._most_elements:
            if self._most_elements:
                self._largest = seen_forward(args, kwargs)
            self._most_elements = num_elements
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

    def steps(
        self, *, is_newest: bool = False, is_largest: bool = False
    ) -> Callable[[], CopiedStep]:
        """Return what makes such a step, now and later, and does not hold the model.

        Args:
            is_newest: as for :meth:`step`.
            is_largest: as in the largest call since the first one.
        """
        ref = self._model
        seen = self._largest if is_largest else self.seen
        if is_newest and self._channel.newest is not None:
            seen = seen_forward(*self._channel.newest)

        def make() -> CopiedStep:
            model = ref()
            if model is None or seen is None:
                raise CopyError("the model that was attached was not called itself.")
            return CopiedStep(model, seen)

        return make


class CopiedStep:
    """One step of a fake copy of a model, as its forward was called."""

    def __init__(self, model: nn.Module, seen: SeenForward) -> None:
        self._model = model
        self._seen = seen
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._interrupts = HeldInterrupts()

    @property
    def kernels(self) -> KernelSettings:
        """The device that the model is on, and this process's settings."""
        first = next(self._model.parameters(), None)
        return settings_of(torch.device("cpu") if first is None else first.device)

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Make the copy.

        Raises:
            CopyError: the model has what cannot be copied so.
        """
        # Hooks of autograd on its tensors, and graphs, are the model's own.
        fake_mode = _without_pointers(FakeTensorMode(allow_non_fake_inputs=True))
        with ExitStack() as stack:
            stack.enter_context(self._interrupts)
            stack.enter_context(_same_random_numbers())
            stack.enter_context(_no_global_hooks())
            what, memo = "the model", dict[int, Any]()
            try:
                with torch.no_grad(), FakeCopyMode(fake_mode):
                    fake = copy.deepcopy(self._model, memo)
                    what = "what the model is called with"
                    self._arguments = copy.deepcopy((self._seen.args, self._seen.kwargs), memo)
            except Exception as error:  # of whatever the model holds
                raise CopyError(
                    f"{what} cannot be copied to fake tensors: "
                    f"{_quantized_weight(self._model) or describe_error(error)}"
                ) from error
            _check_apart(fake, self._model)
            _forget_hooks(fake)
            stack.enter_context(fake_mode)
            stack.enter_context(_answers(self._seen.has_padding))
            yield fake, fake_mode

    def let_gradients_go(self, model: nn.Module) -> None:
        """Gradients stay, as in a loop by hand."""

    def state_bytes(self, model: nn.Module) -> int:
        """Return 0: an optimizer's states are not known of."""
        return 0

    def run(self, model: nn.Module, label: Callable[[Tensor, str], None]) -> None:
        """Run forward, loss and backward.

        Raises:
            CopyError: the model's forward looks at values, uses tensors that are not the copy's, or
                has no result to go back from.
        """
        args, kwargs = tree_map(_empty, self._arguments)
        guard = _OnlyTheCopy(self._interrupts)
        try:
            with guard:
                with self._autocast(model):
                    outputs = model(*args, **kwargs)
                    loss = loss_of(outputs)
                if guard.error is not None:
                    raise guard.error  # the model's own code went on in spite of it
                label(loss, "the loss")
                loss.backward()  # type: ignore[no-untyped-call]
        except CopyError:
            raise
        except Exception as error:  # of the model's own code
            raise CopyError(
                f"the model cannot be run on fake tensors, which have no values: "
                f"{describe_error(error)}"
            ) from error

    def _autocast(self, model: nn.Module) -> AbstractContextManager[Any]:
        if self._seen.autocast_dtype is None:
            return nullcontext()
        device = next(model.parameters()).device.type
        return torch.autocast(device, dtype=self._seen.autocast_dtype)


class _OnlyTheCopy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, refuses operations that would reach what is trained for real.

    Tensors that are only read, constants of a function above all, are let through.
    """

    def __init__(self, interrupts: HeldInterrupts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._interrupts = interrupts
        self.error: CopyError | None = None
        """The first refusal; None before."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or refuse it."""
        kwargs = kwargs or {}
        if func.namespace != "prim":  # which are asked where nothing may be raised
            self._interrupts.let_in()
        real = [tensor for tensor in tensors_in((args, kwargs)) if not is_fake(tensor)]
        if real:
            what = None
            if any(tensor.requires_grad for tensor in real):
                what = "trains"
            elif func.namespace == "c10d" or any(map(_is_real, _written(func, args, kwargs))):
                what = "changes"
            if what is not None:
                error = CopyError(
                    f"the model's forward {what} tensors that a copy of it does not have of its "
                    "own: a function or a global variable holds them."
                )
                self.error = self.error or error
                raise error
        return func(*args, **kwargs)


def _is_real(tensor: Tensor) -> bool:
    return not is_fake(tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tensors_in((given,))


def _without_pointers(fake_mode: FakeTensorMode) -> FakeTensorMode:
    """Have tensors refuse to tell an address: theirs is 0, and a kernel would go there.

    Where torch does not know that yet, nothing can be done.
    """
    if hasattr(fake_mode, "_allow_unsafe_data_ptr_access"):
        fake_mode._allow_unsafe_data_ptr_access = False
    return fake_mode


def _check_apart(fake: nn.Module, model: nn.Module) -> None:
    """Check that a copy has nothing of the model's own.

    Raises:
        CopyError: a module copies itself in a way of its own (``__deepcopy__``), not as a whole.
    """
    own = {id(module) for module in model.modules()}
    for name, module in fake.named_modules():
        if id(module) in own:
            where = f"its module {name!r}" if name else "it"
            raise CopyError(f"the model cannot be copied: {where} is its own copy.")
    for name, tensor in (*fake.named_parameters(), *fake.named_buffers()):
        if not is_fake(tensor):
            why = _quantized_weight(model) or f"{name!r} stays as it is"
            raise CopyError(f"the model cannot be copied to fake tensors: {why}.")


def _quantized_weight(model: nn.Module) -> str:
    """Name the first parameter of *model* that is of a class of another library; empty if none is.

    Such a class (bitsandbytes' ``Params4bit`` and ``Int8Params``) has values beside its tensor,
    which the kernels of its library read.
    """
    for name, parameter in model.named_parameters():
        kind = type(parameter)
        library = kind.__module__.partition(".")[0]
        if library not in ("torch", "hf_pyao"):
            return f"{name!r} is a {kind.__name__} of {library}, which holds more than a tensor"
    return ""


def _same_random_numbers() -> AbstractContextManager[None]:
    """Leave the generators of the process as they were: Python's, numpy's and torch's."""
    cuda: Any = torch.cuda
    device = cuda.current_device() if cuda.is_initialized() else None
    return RandomState([] if device is None else [torch.device("cuda", device)]).kept()


def _no_global_hooks() -> AbstractContextManager[None]:
    """Call no hooks that are on all modules: whoever put them on means real ones."""
    from hf_pyao.model.fake_cuda.cuda_operations import Replacement, replaced

    place = nn.modules.module
    names = [f"_global_{name}" for name in _HOOKS]
    return replaced(*(Replacement(place, name, OrderedDict()) for name in names))  # type: ignore[arg-type]


def seen_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenForward:
    """Return what a forward with these arguments is called with, autocast as it is here."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors} or {"cpu"}
    device = next((each for each in devices if each != "cpu"), "cpu")
    is_autocast = torch.is_autocast_enabled(device)
    mask = kwargs.get("attention_mask")
    has_padding = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
    return SeenForward(
        tree_map(_shape_of, args),
        tree_map(_shape_of, dict(kwargs)),
        torch.get_autocast_dtype(device) if is_autocast else None,
        has_padding,
    )


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.dtype, value.device)
    return value


def _empty(value: Any) -> Any:
    return value.empty() if isinstance(value, TensorShape) else value


def loss_of(outputs: Any) -> Tensor:
    """Return the loss among a model's outputs, or a number that all of them are in."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.sum()
    found = [
        leaf
        for leaf in tree_leaves(tuple(outputs.values()) if isinstance(outputs, dict) else outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not found:
        raise CopyError("nothing that its forward returns has a gradient.")
    return found[0].float().sum()


def _forget_hooks(model: nn.Module) -> None:
    """Take the hooks off a copy, but for those that belong to the model's own code.

    Whoever put the others on means the model itself. transformers collects hidden states, router
    logits and attention weights by hooks that it puts on once: without them these are absent.
    """
    for module in model.modules():
        for name in _HOOKS:
            hooks = getattr(module, f"_{name}")
            for key in [key for key, hook in hooks.items() if not is_of_transformers(hook)]:
                del hooks[key]


def is_of_transformers(hook: object) -> bool:
    """Say whether a module's hook is one by which transformers collects outputs of modules."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _answers(has_padding: bool) -> AbstractContextManager[None]:
    """Answer what transformers asks of values, which fake tensors do not have.

    Other threads get the answers that they would get without this.
    """
    from hf_pyao.model.fake_cuda.cuda_choices import answers_without_values, grouped_products
    from hf_pyao.model.fake_cuda.cuda_operations import Replacement, replaced

    def under_fake_mode(each: Replacement) -> Replacement:
        own = getattr(each.module, each.name, None)

        def answer(*args: Any, **kwargs: Any) -> Any:
            assert own is not None
            return (own if active_fake_mode() is None else each.instead)(*args, **kwargs)

        return each._replace(instead=answer)

    answers = answers_without_values(has_padding=has_padding)
    return replaced(*map(under_fake_mode, answers), *grouped_products())
