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

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.model.head.deferred_arguments import is_number, only_dtype, sizes_of, split_index
from hf_pyao.model.head.put_off_call import PutOffCall
from hf_pyao.model.losses.stand_in import TensorStandIn, in_full
from hf_pyao.model.losses.transforms import Cast, Divide, LogitTransform, Scale, Tanh

_Step = Callable[[Tensor], Tensor]
_Number = float  # the class below has a method of the name `float`


class DeferredLogits(TensorStandIn):
    """Stands in for a tensor of logits; see [Note: Deferred logits].

    Made by the head's call; its other ways to be made are the methods.

    Args:
        hidden: (..., D) hidden states, in the graph.
        call: the head's call.
    """

    def __init__(self, hidden: Tensor, call: PutOffCall) -> None:
        self._hidden = hidden
        self._call = call
        self._transforms: tuple[LogitTransform, ...] = ()
        self._num_vocab = call.num_vocab
        self._dtype = call.dtype
        self._tensor: Tensor | None = None
        self._parent: DeferredLogits | None = None
        self._step: _Step | None = None
        self._relatives = [weakref.ref(self)]

    @property
    def tensor(self) -> Tensor | None:
        """The logits if something has needed them, else None."""
        return self._tensor

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
            if self._parent is None or self._step is None:
                self._tensor = self._call.project(self._hidden, reason)
            else:
                self._tensor = self._step(self._parent._compute(reason))
            self._parent = self._step = None
        return self._tensor

    # What a tensor knows about itself without its elements.

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        if self._tensor is not None:
            return self._tensor.shape
        return torch.Size((*self._hidden.shape[:-1], self._num_vocab))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self._dtype if self._tensor is None else self._tensor.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self._call.device if self._tensor is None else self._tensor.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the logits would be part of the graph."""
        if self._tensor is not None:
            return self._tensor.requires_grad
        return self._call.requires_grad

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of logits."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        state = "put off" if self._tensor is None else "computed"
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    # Steps that are remembered. Once the logits exist everything happens on them.

    def _made(self, step: _Step, hidden: Tensor | None = None) -> DeferredLogits:
        """Return what *step* makes of these logits, of the same hidden states or of *hidden*."""
        made = DeferredLogits.__new__(DeferredLogits)
        made._hidden = self._hidden if hidden is None else hidden
        made._call, made._transforms = self._call, self._transforms
        made._num_vocab, made._dtype = self._num_vocab, self._dtype
        made._tensor, made._parent, made._step = None, self, step
        made._relatives = self._relatives
        made._relatives.append(weakref.ref(made))
        return made

    def _waits(self) -> bool:
        """Whether a step can be remembered: without gradients it would leave the graph."""
        can = torch.is_grad_enabled() or self._call.without_gradients
        return self._tensor is None and can

    def _then(self, transform: LogitTransform) -> DeferredLogits:
        made = self._made(transform.apply)
        made._transforms = (*self._transforms, transform)
        if isinstance(transform, Cast):
            made._dtype = transform.dtype
        return made

    def mul(self, other: Any) -> Any:
        """Scale by a number; anything else computes the logits."""
        if self._waits() and is_number(other):
            return self._then(Scale(other))
        return self.materialize("a product with a tensor").mul(in_full(other, "a product"))

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        """Divide by a number; anything else computes the logits."""
        if self._waits() and is_number(other) and rounding_mode is None:
            return self._then(Divide(other))
        other = in_full(other, "a division")
        return self.materialize("a division").div(other, rounding_mode=rounding_mode)

    def tanh(self) -> Any:
        """Take the hyperbolic tangent."""
        return self._then(Tanh()) if self._waits() else self.materialize("tanh").tanh()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change the dtype; a change of device computes the logits."""
        dtype = only_dtype(args, kwargs, self.device)
        if dtype is None or not self._waits():
            return self.materialize("to").to(*in_full(args, "to"), **kwargs)
        return self if dtype == self._dtype else self._then(Cast(dtype))

    def float(self, **kwargs: Any) -> Any:
        """Cast to float32."""
        return self.to(torch.float32, **kwargs)

    def contiguous(self, **kwargs: Any) -> Any:
        """Return a copy, or a stand-in for the same memory if that is contiguous."""
        if kwargs or not self._waits():
            return self.materialize("contiguous").contiguous(**kwargs)
        return self._made(Tensor.contiguous)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        """Reshape the token dimensions; anything else computes the logits."""
        return self._reshaped(shape, Tensor.view, **kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Reshape the token dimensions; anything else computes the logits."""
        return self._reshaped(shape, Tensor.reshape, **kwargs)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Merge token dimensions; merging the vocabulary too computes the logits."""
        if self._waits() and end_dim % self.ndim < self.ndim - 1:
            hidden = self._hidden.flatten(start_dim, end_dim)
            return self._made(lambda logits: logits.flatten(start_dim, end_dim), hidden)
        return self.materialize("flatten").flatten(start_dim, end_dim)

    def _reshaped(
        self, shape: tuple[Any, ...], reshape: Callable[..., Tensor], **kwargs: Any
    ) -> Any:
        sizes = sizes_of(shape)
        if self._waits() and sizes is not None and sizes[-1] == self._num_vocab:
            hidden = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
            return self._made(lambda logits: reshape(logits, sizes), hidden)
        return reshape(self.materialize(reshape.__name__), *shape, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        """Slice the token dimensions, or cut the vocabulary; anything else computes the logits."""
        split = split_index(index, self.ndim) if self._waits() else None
        if split is None:
            return super().__getitem__(index)
        tokens, stop = split
        made = self._made(lambda logits: logits[index], self._hidden[tokens])
        if stop is not None:
            made._num_vocab = len(range(self._num_vocab)[:stop])
        return made

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: _Number = 0.0,
    ) -> Tensor:
        """Return ``F.cross_entropy(logits, target, ...)``, in chunks where that gives the same."""
        plain = weight is None and size_average is None and reduce is None
        if (
            self._tensor is None
            and plain
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

    __mul__ = mul
    __rmul__ = mul
    __truediv__ = div

    _torch_functions = {  # noqa: RUF012 (read only; declared as a ClassVar in the base)
        F.cross_entropy: cross_entropy,
        torch.tanh: tanh,
        torch.mul: mul,
        torch.multiply: mul,
        torch.div: div,
        torch.divide: div,
        torch.true_divide: div,
        torch.flatten: flatten,
        torch.reshape: reshape,
    }
