"""An object that is used like a tensor and computed when its elements are first needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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

    _functions: ClassVar[frozenset[str]] = frozenset()
    """Names of ``torch`` functions that the subclass's method of that name answers for."""

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
        name, given = getattr(func, "__name__", str(func)), dict(kwargs or {})
        is_alone = bool(args) and isinstance(args[0], cls) and name in cls._functions
        # A result that is there already needs elements.
        if is_alone and given.pop("out", None) is None:
            return getattr(args[0], name)(*args[1:], **given)
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
        tensor = self.materialize(name.strip("_"))
        result = getattr(tensor, name)(*in_full(args, name))
        return self if result is tensor else result  # `logits *= 2` keeps the object

    return operator


# Python looks these up on the class, past __getattr__.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul "
    "rmatmul neg pos abs invert and rand or ror xor rxor lshift rshift eq ne lt le gt ge bool "
    "float int complex index contains len reversed iter getitem setitem array deepcopy reduce_ex "
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
).split():
    setattr(TensorStandIn, f"__{_name}__", _on_the_tensor(f"__{_name}__"))
