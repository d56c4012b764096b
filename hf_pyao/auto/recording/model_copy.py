"""A training step of a running model on fake tensors: the same operations, and no memory.

:class:`CopiedStep` runs a fake copy of a model, called as
:class:`~hf_pyao.auto.recording.seen_forward.SeenForward` says. It changes neither the model's
weights and gradients nor the random numbers of the process. A copy that leads back to the model is
refused, such as one whose functions hold the model's own modules.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pyao.auto.recording.compiled_copies import CompiledCopies
from hf_pyao.auto.recording.gathers import Gathers
from hf_pyao.auto.recording.held_interrupts import HeldInterrupts
from hf_pyao.auto.recording.quantised_copies import note_stand_ins
from hf_pyao.auto.recording.seen_forward import SeenForward, with_tensors
from hf_pyao.auto.recording.sharded_copy import CopyError as CopyError
from hf_pyao.auto.recording.sharded_copy import ShardedUnits
from hf_pyao.auto.recording.zero_copy import ZeroCopy
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.model.weights.places import compute_device, streamed_in
from hf_pyao.plan.hardware.kernel_settings import KernelSettings, settings_of
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.text import describe_error
from hf_pyao.training_engines import Feature, engine_of_module

_HOOKS = (
    *("forward_hooks", "forward_pre_hooks", "forward_hooks_with_kwargs"),
    *("forward_pre_hooks_with_kwargs", "forward_hooks_always_called"),
    *("backward_hooks", "backward_pre_hooks"),
)
"""Tables of a module's hooks; ``_global_`` in front are those of all modules."""


class CopiedStep:
    """One step of a fake copy of a model, as its forward was called."""

    def __init__(self, model: nn.Module, seen: SeenForward) -> None:
        self._model = model
        self._seen = seen
        self._compiled = CompiledCopies(model)
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._units = ShardedUnits(model)
        self._zero = ZeroCopy(model)
        self._gathers = Gathers(())
        self._interrupts = HeldInterrupts()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        if self._units:
            return self._units.device
        return compute_device(self._model) or torch.device("cpu")

    @property
    def kernels(self) -> KernelSettings:
        """The device that the model is on, and this process's settings."""
        return settings_of(self.device)

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Make the copy; what FSDP2 or ZeRO has sharded is gathered in it while modules run.

        Raises:
            CopyError: the model has what cannot be copied so.
        """
        for module in self._model.modules():
            if why_not := engine_of_module(module).reason(Feature.PLANNING):
                raise CopyError(f"{why_not}.")
        # Hooks of autograd on its tensors, and graphs, are the model's own.
        fake_mode = _without_pointers(FakeTensorMode(allow_non_fake_inputs=True))
        with ExitStack() as stack:
            stack.enter_context(self._interrupts)
            stack.enter_context(_same_random_numbers())
            stack.enter_context(_no_global_hooks())
            what, memo = "the model", dict[int, Any]()
            try:
                with torch.no_grad(), FakeCopyMode(fake_mode):
                    self._compiled.note_inner(memo)
                    note_stand_ins(self._model, memo)
                    self._units.make_whole(memo, fake_mode)
                    self._zero.make_whole(memo, fake_mode)
                    memo.update(_streamed_on_device(self._model, fake_mode))
                    fake = copy.deepcopy(self._model, memo)
                    what = "what the model is called with"
                    self._arguments = copy.deepcopy((self._seen.args, self._seen.kwargs), memo)
            except CopyError:
                raise
            except Exception as error:  # of whatever the model holds
                raise CopyError(
                    f"{what} cannot be copied to fake tensors: "
                    f"{_quantized_weight(self._model) or describe_error(error)}"
                ) from error
            _check_apart(fake, self._model)
            _forget_hooks(fake)
            self._compiled.compile(fake, memo)
            stack.enter_context(fake_mode)
            stack.enter_context(_answers(self._seen.has_padding))
            self._gathers = Gathers([*self._units.units(memo), *self._zero.units(fake)])
            self._gathers.install()
            yield fake, fake_mode

    def let_gradients_go(self, model: nn.Module) -> None:
        """Gradients stay, as in a loop by hand."""

    def state_bytes(self, model: nn.Module) -> int:
        """Return 0: an optimizer's states are not known of."""
        return 0

    def run(
        self, model: nn.Module, label: Callable[[Tensor, str], None], exchanged: Exchanged
    ) -> None:
        """Run forward, loss and backward.

        Raises:
            CopyError: the model's forward looks at values, uses tensors that are not the copy's, or
                has no result to go back from.
        """
        args, kwargs = with_tensors(self._arguments)
        self._gathers.tell(exchanged)
        guard = _OnlyTheCopy(self._interrupts, compiles=bool(self._compiled))
        try:
            with guard:
                with self._autocast():
                    outputs = model(*args, **kwargs)
                    loss = loss_of(outputs)
                if guard.error is not None:
                    raise guard.error  # the model's own code went on in spite of it
                label(loss, "the loss")
                loss.backward()  # type: ignore[no-untyped-call]
                self._gathers.end_micro_batch()
        except CopyError:
            raise
        except Exception as error:  # of the model's own code
            raise CopyError(
                f"the model cannot be run on fake tensors, which have no values: "
                f"{describe_error(error)}"
            ) from error

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._seen.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._seen.autocast_dtype)


class _OnlyTheCopy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, refuses operations that would reach what is trained for real.

    Tensors that are only read, constants of a function above all, are let through.
    """

    def __init__(self, interrupts: HeldInterrupts, *, compiles: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._interrupts = interrupts
        self._compiles = compiles
        self.error: CopyError | None = None
        """The first refusal; None before."""

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let torch.compile compile under this mode, which then sees what the code runs."""
        return self._compiles

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
    """Make fake tensors refuse to return an address: theirs is 0, and a kernel would write there.

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
    """Call no hooks that are on all modules: they are meant for the real model."""
    from hf_pyao.model.fake_cuda.cuda_operations import Replacement, replaced

    place = nn.modules.module
    names = [f"_global_{name}" for name in _HOOKS]
    return replaced(*(Replacement(place, name, OrderedDict()) for name in names))  # type: ignore[arg-type]


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


def _streamed_on_device(model: nn.Module, fake_mode: FakeTensorMode) -> dict[int, Any]:
    """Return by id of each streamed weight a fake one that is on the device, and on its own.

    On the host the weights of a layer lie in one storage.
    """
    with fake_mode:
        return {
            id(weight): nn.Parameter(
                torch.empty_strided(
                    weight.size(), weight.stride(), dtype=weight.dtype, device=device
                ),
                requires_grad=False,
            )
            for weight, device in streamed_in(model)
            if type(weight) is nn.Parameter
        }


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

    answers = answers_without_values(has_padding=has_padding, may_lack_mask=True)
    return replaced(*map(under_fake_mode, answers), *grouped_products())
