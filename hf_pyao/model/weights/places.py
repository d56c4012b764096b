"""Where the parameters and buffers of a model are: streamed ones on the host, the others on the
compute device, also when someone moves the model."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_pyao.errors import ConflictError
from hf_pyao.model.patching.lasting_forward import Args, Kwargs, LeftBehind, Method
from hf_pyao.model.weights.packed import move_state

STAYING = "_pyao_streamed_apply"
"""Key of :class:`StayingParameters` in a module whose ``_apply`` it stands for."""


def move_others(
    model: nn.Module, is_streamed: Callable[[object], bool], device: torch.device
) -> None:
    """Move what is not streamed to *device*: parameters with their gradients, and buffers.

    Args:
        model: the whole model.
        is_streamed: says of a parameter that it stays where it is.
        device: the compute device.
    """
    with torch.no_grad():
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is None or parameter.device == device or is_streamed(parameter):
                    continue
                _move(parameter, device)
                move_state(module, parameter, device)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    moved = parameter.detach().to(device)
    if torch._has_compatible_shallow_copy_type(parameter, moved):
        parameter.data = moved
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.detach().to(device)
        return
    gradient = parameter.grad
    other = nn.Parameter(moved, parameter.requires_grad)
    if gradient is not None:
        other.grad = gradient.to(device)
        parameter.grad = None
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


class StayingParameters(LeftBehind):
    """Keeps the streamed parameters of a module on the host when the model is moved.

    It stands for the module's ``_apply``: ``model.to(device)``, as Trainer and Accelerate call it,
    moves everything else.

    Args:
        is_streamed: says of a parameter whether it is on the host.
        device: where compute reads it.
    """

    def __init__(self, is_streamed: Callable[[object], bool], device: torch.device) -> None:
        self._is_streamed = is_streamed
        self._device = device

    def streamed(self, module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.device]]:
        """Yield the streamed parameters of *module*, and the device on which they are read."""
        for parameter in dict.values(module._parameters):
            if parameter is not None and self._is_streamed(parameter):
                yield parameter, self._device

    def run(self, module: nn.Module, own: Method, args: Args, kwargs: Kwargs) -> Any:
        """Apply a function to all parameters but those that are streamed.

        Raises:
            ConflictError: it changes their dtype.
        """
        function = args[0]
        table = module.__dict__["_parameters"]
        staying = {name: p for name, p in table.items() if self._is_streamed(p)}
        for name, parameter in staying.items():
            blank = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            if function(blank).dtype != parameter.dtype:
                raise ConflictError(
                    f"the dtype of {name!r} of {type(module).__name__} cannot be changed while its "
                    "weights are streamed. Change it before the model is attached, or detach "
                    "first.",
                    key="streamed-weight-replaced",
                )
        others = {name: p for name, p in table.items() if name not in staying}
        module.__dict__["_parameters"] = others
        try:
            own(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = table
            for name, value in others.items():
                if dict.get(table, name) is not value:
                    dict.__setitem__(table, name, value)
        return module


def has_streamed(module: nn.Module) -> bool:
    """Say whether *module* itself has streamed parameters."""
    return module.__dict__.get(STAYING) is not None


def streamed_in(model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.device]]:
    """Yield each streamed parameter of *model*, and the device on which it is read."""
    for module in model.modules():
        handle = module.__dict__.get(STAYING)
        if handle is not None:
            yield from handle.streamed(module)


def compute_device(model: nn.Module) -> torch.device | None:
    """Return the device on which *model* reads its first parameter; None if it has none."""
    first = next(model.parameters(), None)
    if first is None:
        return None
    return next((device for p, device in streamed_in(model) if p is first), first.device)


class ComputeDevice:
    """Has ``model.device`` say where compute runs, while a model's first weight is on the host.

    transformers takes the device of the first parameter, by a property of the class, which only a
    class can answer in place of. So modules get a subclass with the same name, whose copies and
    pickles have the class that was there before.

    Args:
        device: the compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed: list[tuple[weakref.ref[nn.Module], type[nn.Module]]] = []

    def put_on(self, model: nn.Module) -> None:
        """Answer for all parts of *model* that have a device, and would say another."""
        for module in model.modules():
            own = type(module)
            if not isinstance(getattr(own, "device", None), property):
                continue
            if next(iter(module.parameters()), torch.empty(0)).device == self._device:
                continue
            self._changed.append((weakref.ref(module), own))
            module.__class__ = _with_device(own, self._device)

    def take_off(self) -> None:
        """Undo :meth:`put_on`. It may be called again."""
        for ref, own in self._changed:
            module = ref()
            if module is not None and type(module).__bases__ == (own,):
                module.__class__ = own
        self._changed = []


def _with_device(own: type[nn.Module], device: torch.device) -> type[nn.Module]:
    """Return a subclass of *own*, of the same name, whose instances compute on *device*."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        anything: Any = own
        _, _, *rest = anything.__reduce_ex__(self, protocol)
        return copyreg._reconstructor, (own, object, None), *rest  # type: ignore[attr-defined]

    members = {
        "device": property(lambda self: device),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
    }
    return type(own.__name__, (own,), members)
