"""A training step of a model that runs, on fake tensors: the same operations, and no memory.

:class:`ForwardWatch` notes what the model is called with; :class:`CopiedStep` runs a fake copy of
the model that way. The model itself is not touched, its weights and its gradients neither.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hf_pyao.errors import PyAOError
from hf_pyao.integrations.wrappers import unwrap_parallel
from hf_pyao.runtime.model_hooks import ModelHook, take_off
from hf_pyao.runtime.passing_over import is_recomputing
from hf_pyao.text import describe_error


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


class _WatchHook(ModelHook):
    """Pre-forward hook of the model."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Take note of the call."""
        watch: Any = self.lifecycle
        if kwargs is not None and not torch.compiler.is_compiling():
            watch.note(module, args, kwargs)


class BeforeForward(Protocol):
    """Is told of a forward that is about to run."""

    def __call__(self, seen: SeenForward, *, is_first: bool) -> None:
        """Hear of it; *seen* is what the first one was called with."""
        ...


class ForwardWatch:
    """Notes what a model's first forward in training is called with, and tells of all of them.

    Args:
        model: what the user calls, or a wrapper around it.
        owner: who is to be found by the hook.
        before: called before each forward in training, until :meth:`remove`.
    """

    def __init__(self, model: nn.Module, owner: object, before: BeforeForward) -> None:
        self.owner = owner
        self._before = before
        inner = unwrap_parallel(model)
        self._model = weakref.ref(inner)
        self.seen: SeenForward | None = None
        """What it was called with; None until then."""
        hook: Any = _WatchHook(self)  # type: ignore[arg-type]
        inner.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call, if it is trained."""
        if not module.training or not torch.is_grad_enabled() or is_recomputing():
            return
        is_first = self.seen is None
        if self.seen is None:
            self.seen = _seen(args, kwargs)
        self._before(self.seen, is_first=is_first)

    def remove(self) -> None:
        """Take the hook off. Twice is fine."""
        model = self._model()
        if model is not None:
            take_off(model, self)  # type: ignore[arg-type]

    def step(self) -> CopiedStep:
        """Return a step of the model as it was called.

        Raises:
            CopyError: it was not called, or is gone.
        """
        model = self._model()
        if model is None or self.seen is None:
            raise CopyError("the model that was attached was not called itself.")
        return CopiedStep(model, self.seen)


class CopiedStep:
    """One step of a fake copy of a model, as its forward was called."""

    def __init__(self, model: nn.Module, seen: SeenForward) -> None:
        self._model = model
        self._seen = seen

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Make the copy.

        Raises:
            CopyError: the model has what cannot be copied so.
        """
        # Hooks of autograd on its tensors, and graphs, are the model's own.
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with ExitStack() as stack:
            try:
                with torch.no_grad(), FakeCopyMode(fake_mode):
                    fake = copy.deepcopy(self._model)
                _forget_hooks(fake)
            except Exception as error:  # of whatever the model holds
                raise CopyError(
                    f"the model cannot be copied to fake tensors: {describe_error(error)}"
                ) from error
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
            CopyError: the model's forward looks at values, or has no result to go back from.
        """
        args, kwargs = tree_map(_empty, (self._seen.args, self._seen.kwargs))
        try:
            with self._autocast(model):
                outputs = model(*args, **kwargs)
                loss = _loss_of(outputs)
            label(loss, "the loss")
            loss.backward()  # type: ignore[no-untyped-call]
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


def _seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenForward:
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


def _loss_of(outputs: Any) -> Tensor:
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
    """Take all hooks off a copy: whoever put them on means the model itself."""
    for module in model.modules():
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            hooks.clear()


def _answers(has_padding: bool) -> AbstractContextManager[None]:
    """Answer what transformers asks of values, which fake tensors do not have."""
    from hf_pyao.integrations.cuda_choices import answers_without_values
    from hf_pyao.simulation.cuda_operations import replaced

    return replaced(*answers_without_values(has_padding=has_padding))
