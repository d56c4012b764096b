"""Logits that are not computed until somebody needs them, and never if only the loss does.

[Note: Deferred logits] During a training forward the head returns a :class:`DeferredLogits`: the
hidden states, and how to project them. What the model does to its logits on the way to the loss is
remembered: pointwise steps (``/ cap``, ``tanh``, ``* scale``, ``.float()``) join a chain that every
chunk replays; slices and reshapes of the token dimensions act on the hidden states at once; a cut
of the vocabulary is kept as a number. ``torch.nn.functional.cross_entropy`` of such an object is
the chunked loss. So the model's own loss code runs, with all it does about shifting, ignored
labels, ``num_items_in_batch`` or smoothing, for any model and any loss function that ends there.
Any other use computes the logits, once, exactly as the head would have, and goes on with them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_pyao.losses.deferred_arguments import is_number, only_dtype, sizes_of, split_index
from hf_pyao.losses.stand_in import TensorStandIn
from hf_pyao.losses.transforms import Cast, Divide, LogitTransform, Scale, Tanh, apply_all

_Number = float  # the class below has a method of the name `float`


class HeadCall(Protocol):
    """One call of a head that was put off."""

    num_vocab: int
    """Columns of the logits."""
    dtype: torch.dtype
    """What the head would have returned."""
    device: torch.device
    """Where the head would have put it."""
    requires_grad: bool
    """Whether its result would have been part of the graph."""

    def project(self, hidden: Tensor, reason: str) -> Tensor:
        """Call the head as the model would have: (..., D) -> (..., V). *reason*: what needs it."""
        ...

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        transforms: tuple[LogitTransform, ...],
        num_valid_vocab: int,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Tensor:
        """Return the loss of (N, D) hidden states and (N,) labels without their logits."""
        ...


class DeferredLogits(TensorStandIn):
    """Stands in for a tensor of logits; see [Note: Deferred logits].

    Args:
        hidden: (..., D) hidden states, in the graph.
        call: the head's call.
        transforms: pointwise steps since.
        num_vocab: columns left; None: all of the head's.
        dtype: dtype after the steps; None: the head's.
    """

    def __init__(
        self,
        hidden: Tensor,
        call: HeadCall,
        transforms: tuple[LogitTransform, ...] = (),
        num_vocab: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._hidden = hidden
        self._call = call
        self._transforms = transforms
        self._num_vocab = call.num_vocab if num_vocab is None else num_vocab
        self._dtype = call.dtype if dtype is None else dtype
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The logits if something has needed them, else None."""
        return self._tensor

    def materialize(self, reason: str = "materialize") -> Tensor:
        """Return the logits: what the model would have had, with their graph. Computed once.

        Args:
            reason: what needs them, for the report.

        Raises:
            SavedTensorModifiedError: an optimizer step or another in-place change came between the
                forward and this call, so that other logits would come out.
        """
        if self._tensor is None:
            with torch.enable_grad():
                logits = apply_all(self._transforms, self._call.project(self._hidden, reason))
                is_cut = self._num_vocab < self._call.num_vocab
                self._tensor = logits[..., : self._num_vocab] if is_cut else logits
        return self._tensor

    # What a tensor knows about itself without its elements.

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self._hidden.shape[:-1], self._num_vocab))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self._call.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._hidden.dim()

    @property
    def requires_grad(self) -> bool:
        """Whether the logits would be part of the graph."""
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

    def _then(self, transform: LogitTransform, dtype: torch.dtype | None = None) -> DeferredLogits:
        chain = (*self._transforms, transform)
        dtype = self._dtype if dtype is None else dtype
        return DeferredLogits(self._hidden, self._call, chain, self._num_vocab, dtype)

    def _over_tokens(self, hidden: Tensor, num_vocab: int | None = None) -> DeferredLogits:
        vocab = self._num_vocab if num_vocab is None else num_vocab
        return DeferredLogits(hidden, self._call, self._transforms, vocab, self._dtype)

    def mul(self, other: Any) -> Any:
        """Scale by a number; anything else computes the logits."""
        if self._tensor is None and is_number(other):
            return self._then(Scale(other))
        return self.materialize("a product with a tensor").mul(other)

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        """Divide by a number; anything else computes the logits."""
        if self._tensor is None and is_number(other) and rounding_mode is None:
            return self._then(Divide(other))
        return self.materialize("a division").div(other, rounding_mode=rounding_mode)

    def tanh(self) -> Any:
        """Take the hyperbolic tangent."""
        return self._then(Tanh()) if self._tensor is None else self._tensor.tanh()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change the dtype; a change of device computes the logits."""
        dtype = only_dtype(args, kwargs, self.device)
        if self._tensor is not None or dtype is None:
            return self.materialize("to").to(*args, **kwargs)
        return self if dtype == self._dtype else self._then(Cast(dtype), dtype)

    def float(self) -> Any:
        """Cast to float32."""
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        """Return itself."""
        return self if self._tensor is None else self._tensor.contiguous()

    def view(self, *shape: Any) -> Any:
        """Reshape the token dimensions; anything else computes the logits."""
        return self._reshaped(shape, "view")

    def reshape(self, *shape: Any) -> Any:
        """Reshape the token dimensions; anything else computes the logits."""
        return self._reshaped(shape, "reshape")

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Merge token dimensions; merging the vocabulary too computes the logits."""
        if self._tensor is None and end_dim % self.ndim < self.ndim - 1:
            return self._over_tokens(self._hidden.flatten(start_dim, end_dim))
        return self.materialize("flatten").flatten(start_dim, end_dim)

    def _reshaped(self, shape: tuple[Any, ...], name: str) -> Any:
        sizes = sizes_of(shape)
        if self._tensor is None and sizes is not None and sizes[-1] == self._num_vocab:
            return self._over_tokens(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))
        return getattr(self.materialize(name), name)(*shape)

    def __getitem__(self, index: Any) -> Any:
        """Slice the token dimensions, or cut the vocabulary; anything else computes the logits."""
        split = split_index(index, self.ndim) if self._tensor is None else None
        if split is None:
            return super().__getitem__(index)
        tokens, stop = split
        num_vocab = self._num_vocab if stop is None else len(range(self._num_vocab)[:stop])
        return self._over_tokens(self._hidden[tokens], num_vocab)

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
