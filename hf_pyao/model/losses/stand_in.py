"""An object that is used like a tensor and computed when its elements are first needed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor


class TensorStandIn(ABC):
    """Stands in for a tensor that :meth:`materialize` computes.

    ``torch`` functions, operators, methods, attributes, numpy, copying and pickling all end at the
    tensor; a subclass adds what needs no elements. Not a Tensor itself: code that walks through
    containers looking for tensors (DDP, FSDP and DeepSpeed on a model's outputs) passes it by.

    What changes a tensor in place (``*=``, ``mul_``, ``out=``, an assignment to a slice or to an
    attribute) changes the one that :meth:`materialize` returns, for all who hold this object.
    """

    _torch_functions: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}
    """``torch`` functions -> methods of the subclass that answer for them."""

    @abstractmethod
    def materialize(self, reason: str) -> Tensor:
        """Return the tensor. *reason* says what needs it, in a few words."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a ``torch`` function by the method that answers for it, else on the tensor."""
        method = cls._torch_functions.get(func)
        into = (kwargs or {}).get("out")  # a result that is there already: elements are needed
        if method is not None and args and isinstance(args[0], cls) and into is None:
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            return method(*args, **named)
        name = getattr(func, "__name__", str(func))
        return func(*in_full(tuple(args), name), **in_full(dict(kwargs or {}), name))

    def __getattr__(self, name: str) -> Any:
        """Look *name* up on the tensor, unless it is a protocol that few tensors have."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialize(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.materialize(name), name, in_full(value, name))

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor: Any = self.materialize("pickling or copying")
        return tensor.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.materialize("copying"), memo)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        tensor: Any = self.materialize("numpy")
        return tensor.__array__(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.materialize("indexing")[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.materialize("an assignment")[index] = in_full(value, "an assignment")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.materialize("iteration"))

    def __bool__(self) -> bool:
        return bool(self.materialize("bool()"))

    def __eq__(self, other: Any) -> Any:
        return self.materialize("a comparison") == in_full(other, "a comparison")


def in_full(tree: Any, reason: str) -> Any:
    """Return nested tuples, lists and dicts with tensors in place of what stands in for them."""
    if isinstance(tree, TensorStandIn):
        return tree.materialize(reason)
    if isinstance(tree, tuple | list):
        return type(tree)([in_full(item, reason) for item in tree])
    if isinstance(tree, dict):
        return {key: in_full(item, reason) for key, item in tree.items()}
    return tree


def _on_the_tensor(name: str) -> Callable[..., Any]:
    def operator(self: TensorStandIn, *args: Any) -> Any:
        reason = name.strip("_")
        return getattr(self.materialize(reason), name)(*in_full(args, reason))

    return operator


def _in_place(name: str) -> Callable[..., Any]:
    def operator(self: TensorStandIn, other: Any) -> Any:
        reason = name.strip("_")
        tensor = self.materialize(reason)
        result = getattr(tensor, name)(in_full(other, reason))
        return self if result is tensor else result

    return operator


# Python looks operators up on the class, past __getattr__.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul "
    "rmatmul neg pos abs invert and rand or ror xor rxor lshift rshift ne lt le gt ge float int "
    "complex index contains len reversed"
).split():
    setattr(TensorStandIn, f"__{_name}__", _on_the_tensor(f"__{_name}__"))
# Without these `logits *= x` would bind the name to another object and leave this one as it is.
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(TensorStandIn, f"__i{_name}__", _in_place(f"__i{_name}__"))
