"""``CastableView``: a streamed weight that an operation may cast, as autocast does.

[Note: Casts of weights]
A cast has a storage of its own, with no link to the weight that it was made from, and two weights
may have the same shape. So the weight is known only where the cast is made. Under autocast, a
module's attribute gives a view of the slot whose operations torch hands to
:meth:`CastableView.__torch_dispatch__`:

- a view operation (``weight.t()``, ``experts[3]``) gives another castable view, which knows its
  weight and its place in it;
- ``_to_copy``, by which autocast and ``Tensor.to`` cast, makes the cast, and the ring notes what
  makes it again. Where weights are uploaded in that dtype, the cast is the view of the slot;
- every other operation reads the weight in its stored dtype. Where that is not what was uploaded,
  it is copied from the host, which is counted.

Which operations autocast casts is torch's decision alone. Results are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_pyao.engine.recompute.tracing import UnwrappingTensor
from hf_pyao.engine.torch_hooks.custom_operators import run_under_autocast, runner_of

if TYPE_CHECKING:
    from hf_pyao.engine.weights.blocks import Weight

_TO_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True)
class Part:
    """A view of a weight, in elements from the weight's first one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Reader(Protocol):
    """What a castable view asks of the ring."""

    def keep(self, weight: Weight, part: Part, held: torch.Tensor) -> torch.Tensor:
        """Return a view of a slot that equals *held*, and lives as long as the slot holds it."""
        ...

    def stored(self, weight: Weight, part: Part, held: torch.Tensor) -> torch.Tensor:
        """Return *part* as a plain tensor of the stored dtype; *held* is its view of a slot."""
        ...

    def cast(
        self, weight: Weight, part: Part, held: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Return what ``_to_copy`` with *options* makes of *part*; *held* is its view of a slot."""
        ...

    def data_of(self, weight: Weight) -> torch.Tensor:
        """Return what the weight's ``data`` gives."""
        ...

    def refuse_write(self, weight: Weight) -> None:
        """Raise the error for an operation that writes into *weight*."""
        ...


class CastableView(UnwrappingTensor):
    """A streamed weight, or a view of one, in its stored dtype."""

    weight: Weight
    part: Part
    held: torch.Tensor
    """The plain view of a slot; whoever holds this object keeps the slot's bytes."""
    reader: Reader

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(weight: Weight, part: Part, held: torch.Tensor, reader: Reader) -> CastableView:
        """Return *part* of *weight*, whose view of a slot is *held*.

        If the slot has another dtype than the weight, the view has no memory that kernels can read.
        """
        if held.dtype == weight.dtype:
            made = torch.Tensor._make_subclass(CastableView, held, False)
        else:
            made = torch.Tensor._make_wrapper_subclass(
                CastableView,
                part.size,
                strides=part.stride,
                storage_offset=part.offset,
                dtype=weight.dtype,
                device=held.device,
            )
        made.weight, made.part, made.held, made.reader = weight, part, held, reader
        return made

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter that it stands for; whoever exchanges it in a module may hold it alone."""
        return self.weight.ref()

    @property
    def data(self) -> torch.Tensor:
        """The bytes without history; writes into it are noticed and refused."""
        return self.reader.data_of(self.weight)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.reader.refuse_write(self.weight)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.weight.name!r}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy."""
        return self.stored().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leave an unpickled one plain."""
        plain: Any = self.stored().clone()
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run *func* on plain tensors; see [Note: Casts of weights]."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is _TO_COPY and isinstance(first, CastableView):
            return first.reader.cast(first.weight, first.part, first.held, kwargs)
        if func._can_decompose():  # inference mode leaves composite operations whole
            made = run_under_autocast(func.decompose, *args, **kwargs)
            if made is not NotImplemented:
                return made
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        if func.is_view and isinstance(first, CastableView):
            views = first._views(func, args, kwargs)
            if views is not None:
                return views
        return runner_of(func)(*_mapped(args, _stored), **_mapped(kwargs, _stored))

    def _views(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the views that *func* makes; None if they are of another dtype."""
        made = func(self.held, *args[1:], **kwargs)
        outs = list(made) if isinstance(made, list | tuple) else [made]
        if any(out.dtype != self.held.dtype for out in outs):
            return None
        views = [self._view(out) for out in outs]
        return views if isinstance(made, list | tuple) else views[0]

    def _view(self, out: torch.Tensor) -> CastableView:
        offset = self.part.offset + int(out.storage_offset()) - int(self.held.storage_offset())
        part = Part(tuple(out.size()), tuple(out.stride()), offset)
        held = self.reader.keep(self.weight, part, out)
        return CastableView.of(self.weight, part, held, self.reader)

    def stored(self) -> torch.Tensor:
        """Return it as a plain tensor of its dtype."""
        return self.reader.stored(self.weight, self.part, self.held)


def whole_of(weight: Weight) -> Part:
    """Return the part that is all of *weight*."""
    return Part(tuple(weight.size), tuple(weight.master.stride), 0)


def _stored(value: Any) -> Any:
    if isinstance(value, CastableView):
        return value.stored()
    return value


def _mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, of) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, of) for key, each in value.items()}
    return of(value)


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if number >= len(args) else args[number]
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, CastableView):
                each.reader.refuse_write(each.weight)
