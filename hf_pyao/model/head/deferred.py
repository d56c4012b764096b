"""Logits that are not computed until somebody needs them, and never if only the loss does.

[Note: Deferred logits] During a training forward the head returns a :class:`DeferredLogits`: the
hidden states, and how to project them. What the model does to its logits on the way to the loss is
remembered: pointwise steps (``/ cap``, ``tanh``, ``* scale``, ``.float()``) join a chain that every
chunk replays; slices and reshapes of the token dimensions act on the hidden states at once; a cut
of the vocabulary is kept as a number. ``torch.nn.functional.cross_entropy`` of such an object is
the chunked loss. So the model's own loss code runs, with all it does about shifting, ignored
labels, ``num_items_in_batch`` or smoothing, for any model and any loss function that ends there.
Any other use computes the logits, once, exactly as the head would have, and goes on with them.

[Note: Relatives] Objects made from each other stand for tensors that may share memory and graph. As
long as nobody has read an element, there is nothing to share. When the first of them is computed,
all that are alive are computed too, each by the operation that made it from its parent: views are
views, and copies are copies. Whatever is done to one from then on (a hook, an assignment to a
slice, ``mul_``) reaches the others and the loss, as it would without hf_pyao.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.head.put_off_call import PutOffCall
from hf_pyao.model.losses.stand_in import TensorStandIn, in_full
from hf_pyao.model.losses.transforms import (
    Cast,
    Divide,
    LogitTransform,
    Scale,
    Tanh,
    final_dtype,
)

_Use = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of a tensor, and its arguments."""

_Change = dict[str, Any]
"""Arguments of :class:`DeferredLogits` that are others than before."""


class DeferredLogits(TensorStandIn):
    """Stands in for a tensor of logits; see [Note: Deferred logits].

    Made by the head's call, and by its own methods.

    Args:
        hidden: (..., D) hidden states, in the graph.
        call: the head's call.
        transforms: pointwise steps between the head and these logits.
        num_vocab: columns of the logits.
        made_by: the object and the method that made this one; None: the head's call did.
    """

    _functions = frozenset({"cross_entropy", "div", "flatten", "mul", "reshape", "tanh"})

    def __init__(
        self,
        hidden: Tensor,
        call: PutOffCall,
        transforms: tuple[LogitTransform, ...] = (),
        num_vocab: int | None = None,
        made_by: tuple[DeferredLogits, _Use] | None = None,
    ) -> None:
        self._hidden = hidden
        self._call = call
        self._transforms = transforms
        self._num_vocab = call.num_vocab if num_vocab is None else num_vocab
        self._made_by = made_by
        self._tensor: Tensor | None = None
        self._relatives: list[weakref.ref[DeferredLogits]]
        self._relatives = [] if made_by is None else made_by[0]._relatives
        self._relatives.append(weakref.ref(self))

    @property
    def is_put_off(self) -> bool:
        """Whether nothing has needed the logits yet."""
        return self._tensor is None

    def materialize(self, reason: str = "materialize") -> Tensor:
        """Return the logits: what the model would have had, with their graph. Computed once.

        See [Note: Relatives].

        Args:
            reason: what needs them, for the report.

        Raises:
            SavedTensorModifiedError: backward, or an in-place change, came between the forward and
                this call, so that other logits might come out.
        """
        if self._tensor is None:
            for reference in self._relatives:
                if (relative := reference()) is not None:
                    relative._compute(reason)
        return self._compute(reason)

    @torch.enable_grad()  # not by `with`: [Note: Modes] in options.py
    def _compute(self, reason: str) -> Tensor:
        if self._tensor is None:
            if self._made_by is None:
                self._tensor = self._call.project(self._hidden, reason)
            else:
                parent, (name, args, kwargs) = self._made_by
                self._tensor = getattr(parent._compute(reason), name)(*args, **kwargs)
            self._made_by = None
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        """Return what a tensor knows without its elements, or else the logits' attribute."""
        if self._tensor is None and name in _KNOWN:
            return _KNOWN[name](self)
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    # What is remembered. Once the logits exist everything happens on them.

    def _use(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Do what a tensor's method *name* does, later if it can be remembered."""
        # Without gradients a step would leave the graph.
        can_wait = torch.is_grad_enabled() or self._call.without_gradients
        change = None
        if self._tensor is None and can_wait:
            with contextlib.suppress(TypeError):  # other arguments
                change = _REMEMBERED[name](self, *args, **kwargs)
        if change is None:
            tensor = self.materialize(name.strip("_"))
            return getattr(tensor, name)(*in_full(args, name), **in_full(kwargs, name))
        known: _Change = {"transforms": self._transforms, "num_vocab": self._num_vocab}
        known |= {"hidden": self._hidden, **change}
        return DeferredLogits(call=self._call, made_by=(self, (name, args, kwargs)), **known)

    def _and_then(self, transform: LogitTransform) -> _Change:
        return {"transforms": (*self._transforms, transform)}

    def _scaled(self, other: Any, kind: type[Scale | Divide] = Scale) -> _Change | None:
        """By a number; not by a tensor, whose value may be on the device."""
        is_number = isinstance(other, int | float) and not isinstance(other, bool)
        return self._and_then(kind(other)) if is_number else None

    def _divided(self, other: Any, *, rounding_mode: str | None = None) -> _Change | None:
        return None if rounding_mode else self._scaled(other, Divide)

    def _cast(self, *args: Any, **kwargs: Any) -> _Change | None:
        """To another dtype, and to no other device."""
        asked = [*args, *kwargs.values()]
        dtypes = [each for each in asked if isinstance(each, torch.dtype)]
        places = [each for each in asked if isinstance(each, torch.device | str)]
        if any(torch.device(place) != self.device for place in places):
            return None
        if len(dtypes) != 1 or len(asked) != 1 + len(places) or not dtypes[0].is_floating_point:
            return None
        return self._and_then(Cast(dtypes[0]))

    def _reshaped(self, *shape: Any) -> _Change | None:
        """In the token dimensions."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not all(isinstance(size, int) for size in sizes) or sizes[-1] != self._num_vocab:
            return None
        return {"hidden": self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])}

    def _flattened(self, start_dim: int = 0, end_dim: int = -1) -> _Change | None:
        if end_dim % self.ndim == self.ndim - 1:
            return None
        return {"hidden": self._hidden.flatten(start_dim, end_dim)}

    def _indexed(self, index: Any) -> _Change | None:
        """By slices, numbers and masks of the token dimensions; the vocabulary may be cut."""
        parts = list(index) if isinstance(index, tuple) else [index]
        num_dims = [
            each.dim()
            if isinstance(each, Tensor) and each.dtype == torch.bool
            else int(type(each) in (int, slice))
            for each in parts
        ]
        gaps = [at for at, each in enumerate(parts) if each is Ellipsis]
        num_missing = self.ndim - sum(num_dims)
        if num_missing < 0 or num_dims.count(0) != len(gaps) or len(gaps) > 1:
            return None
        at = gaps[0] if gaps else len(parts)
        parts[at : at + 1] = [slice(None)] * num_missing
        cut = parts.pop()
        if not isinstance(cut, slice) or cut.start not in (None, 0) or cut.step not in (None, 1):
            return None
        num_vocab = len(range(self._num_vocab)[cut])
        return {"hidden": self._hidden[(*parts, slice(None))], "num_vocab": num_vocab}

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return ``F.cross_entropy(logits, target, ...)``, in chunks where that gives the same."""
        if (
            self._tensor is None
            and not self._call.is_over
            and weight is None
            and size_average is None
            and reduce is None
            and reduction in ("mean", "sum")
            and isinstance(target, Tensor)
            and target.dtype == torch.int64
            and self.ndim == 2
            and target.shape == self.shape[:1]
            and target.device == self.device
        ):
            return self._call.loss(
                self._hidden,
                target,
                transforms=self._transforms,
                num_valid_vocab=self._num_vocab,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
        logits = self.materialize("a cross_entropy that is no plain mean or sum over tokens")
        return F.cross_entropy(
            logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )


_KNOWN: dict[str, Callable[[DeferredLogits], Any]] = {
    "shape": lambda logits: torch.Size((*logits._hidden.shape[:-1], logits._num_vocab)),
    "dtype": lambda logits: final_dtype(logits._transforms, logits._call.dtype),
    "device": lambda logits: logits._call.device,
    "requires_grad": lambda logits: logits._call.requires_grad,
    "ndim": lambda logits: logits._hidden.ndim,
    "dim": lambda logits: logits._hidden.dim,
    "size": lambda logits: lambda dim=None: logits.shape if dim is None else logits.shape[dim],
}
"""Attributes of logits that are known before they are computed."""

_REMEMBERED: dict[str, Callable[..., _Change | None]] = {
    "mul": DeferredLogits._scaled,
    "__mul__": DeferredLogits._scaled,
    "__rmul__": DeferredLogits._scaled,
    "div": DeferredLogits._divided,
    "__truediv__": DeferredLogits._divided,
    "tanh": lambda logits: logits._and_then(Tanh()),
    "to": DeferredLogits._cast,
    "float": lambda logits: logits._and_then(Cast(torch.float32)),
    "contiguous": lambda logits: {},
    "view": DeferredLogits._reshaped,
    "reshape": DeferredLogits._reshaped,
    "flatten": DeferredLogits._flattened,
    "__getitem__": DeferredLogits._indexed,
}
"""Methods of a tensor -> what changes in the object by them; None: the logits are needed."""

for _name in _REMEMBERED:
    setattr(DeferredLogits, _name, partialmethod(DeferredLogits._use, _name))
