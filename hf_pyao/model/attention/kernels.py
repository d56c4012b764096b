"""Kernels of attention that give the same bits when they run on a part of samples and heads.

What is known of them is from PyTorch's source: ``aten/src/ATen/native/transformers``, there
``cuda/flash_attn/flash_api.cpp`` (``mha_fwd``, ``mha_bwd``, ``num_splits_heuristic``),
``cuda/attention_backward.cu`` and ``attention.cpp``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from hf_pyao.plan.hardware.attention_workspaces import AttentionShape, flash_backward
from hf_pyao.plan.hardware.kernel_settings import ANY_DEVICE, KernelSettings, settings_of

WAVES_OF_AUTO = 8
"""Times the blocks that fill the device: with ``"auto"`` a group has at least as many."""


@dataclass(frozen=True)
class AttentionSettings:
    """What a kernel is told besides query, key and value."""

    is_causal: bool = False
    scale: float | None = None
    """None: one over the square root of the head dimension."""
    dropout_p: float = 0.0


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


class BackwardCall(NamedTuple):
    """Arguments of attention's backward, for all samples and heads or a part of them."""

    grad: Tensor
    """Of the output."""
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    state: Sequence[Tensor]
    """Of dropout."""
    settings: AttentionSettings
    into: Gradients
    """Tensors of the inputs' shapes, which the gradients are written to."""

    def of_queries(self, part: tuple[slice, slice]) -> BackwardCall:
        """Return the call for *part* of what has the query's heads; keys and values stay whole."""
        return self._replace(
            grad=self.grad[part],
            query=self.query[part],
            out=self.out[part],
            logsumexp=self.logsumexp[part],
        )


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention: PyTorch's flash attention for CPUs, which allocates little inside.

    Tensors have shape (batch, heads, length, head_dim). Others are its subclasses.
    """

    @property
    def is_deterministic(self) -> bool:
        """True if backward takes an algorithm whose bits depend on how many pairs there are."""
        return False

    def least_pairs(self, length: int, dropout_p: float) -> int:
        """Return the fewest pairs of a sample and a query head with which bits stay the same.

        Args:
            length: of the queries.
            dropout_p: the rate of dropout.
        """
        return 1

    def least_pairs_of_auto(self, length: int) -> int:
        """Return how many such pairs fill the device well."""
        return 1

    def pair_bytes(self, query: Tensor, key: Tensor) -> int:
        """Return what backward allocates inside for one sample and one key-value head, in bytes."""
        return 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> tuple[Tensor, ...]:
        """Return the output, the logsumexp of each row (float32), and the state of dropout."""
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, settings.dropout_p, settings.is_causal, scale=settings.scale
        )
        return found

    def backward(self, call: BackwardCall) -> None:
        """Write the gradients of query, key and value into ``call.into``."""
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: Gradients = backward(
            *(call.grad, call.query, call.key, call.value, call.out, call.logsumexp),
            *(call.settings.dropout_p, call.settings.is_causal),
            scale=call.settings.scale,
        )
        _write(found, call.into)

    def state_after(self, state: Sequence[Tensor], num_pairs: int) -> Sequence[Tensor]:
        """Return the state of dropout for the group behind *num_pairs* sample-head pairs."""
        return state

    def empty_outputs(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp as forward allocates them for all of *query*."""
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        batch, heads, length = query.shape[:3]
        strides = (length * heads, 1, heads)
        return _like(query), query.new_empty_strided((batch, heads, length), strides, dtype=dtype)

    def empty_gradients(self, *inputs: Tensor) -> Gradients:
        """Return the gradients of query, key and value as backward allocates them."""
        query, key, value = map(_tokens_first, inputs)
        return query, key, value


@dataclass(frozen=True)
class FlashKernel(Kernel):
    """FlashAttention-2 as PyTorch builds it for CUDA.

    A block of the kernel works on one sample, one head and some rows, so that a part of samples and
    heads has the bits of the whole, except where the number of *splits* depends on how many pairs
    there are: forward splits the keys where pairs times blocks of 64 rows fill less than 80 % of
    twice the multiprocessors, and the deterministic backward splits its sums where there are fewer
    pairs than multiprocessors. ``least_pairs`` excludes both. The non-deterministic backward adds
    to dq in the order in which blocks finish, divided or not; dk and dv do not depend on it.

    The gradients of a key-value head are summed over its query heads, in 16 bits each. Where one
    query head of a sample fills the device, the query heads of one key-value head run one after the
    other too: the float32 sums are then of one head, and the same 16-bit gradients are summed. Not
    with dropout and several samples: the pairs of one head do not follow each other.

    Dropout draws the mask of a pair at the generator's offset plus 32 times the pair's position,
    and forward advances the offset by 32 for each pair, so that groups in the order of pairs draw
    the same masks as one call.
    """

    device: KernelSettings = ANY_DEVICE
    """The device's multiprocessors, and whether the kernel is deterministic."""

    def least_pairs(self, length: int, dropout_p: float) -> int:
        """Return the fewest pairs of a sample and a query head with which bits stay the same."""
        splits_not = 1 if dropout_p else -(-self._filling() // -(-max(length, 1) // 64))
        return max(splits_not, self.device.multiprocessors if self.is_deterministic else 1)

    @property
    def is_deterministic(self) -> bool:
        """True if splits of backward's sums depend on how many pairs there are."""
        return self.device.is_deterministic

    def least_pairs_of_auto(self, length: int) -> int:
        """Return how many such pairs fill the device well."""
        return -(-WAVES_OF_AUTO * self._filling() // -(-max(length, 1) // 64))

    def _filling(self) -> int:
        """Return ceil(0.8 x 2 x multiprocessors)."""
        return -(-8 * self.device.multiprocessors // 5)

    def pair_bytes(self, query: Tensor, key: Tensor) -> int:
        """Return what backward allocates inside for one sample and one key-value head, in bytes."""
        shape = AttentionShape(
            batch=1,
            heads=query.shape[1] // key.shape[1],
            key_heads=1,
            queries=query.shape[2],
            keys=key.shape[2],
            head_dim=query.shape[3],
            value_dim=query.shape[3],
            itemsize=query.element_size(),
        )
        whole = self.device._replace(is_deterministic=False)  # of many pairs, with one split
        return sum(flash_backward(shape, whole).values())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> tuple[Tensor, ...]:
        """Return output, logsumexp, and the two tensors of the random number generator's state."""
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, settings.dropout_p, settings.is_causal, False, scale=settings.scale
        )
        return found[0], found[1], found[6], found[7]

    def backward(self, call: BackwardCall) -> None:
        """Write the gradients of query, key and value into ``call.into``."""
        num_samples, num_heads = call.query.shape[:2]
        has_gaps = num_samples > 1 and call.settings.dropout_p  # in the order of one head's masks
        is_alone = call.key.shape[1] == 1 and num_heads > 1
        if not is_alone or has_gaps or not self._is_filled_by(call.query):
            self._backward_of(call)
            return
        keys, values = (_of_query_heads(each, num_heads) for each in (call.key, call.value))
        for head in range(num_heads):
            part = (slice(None), slice(head, head + 1))
            into = call.into[0][part], keys[part], values[part]
            of_head = call.of_queries(part)._replace(into=into)
            if call.settings.dropout_p:
                of_head = of_head._replace(state=self.state_after(call.state, head))
            self._backward_of(of_head)
        torch.sum(keys, 1, out=call.into[1][:, 0])
        torch.sum(values, 1, out=call.into[2][:, 0])

    def _is_filled_by(self, query: Tensor) -> bool:
        """Say whether one query head of each sample fills the device well."""
        length = query.shape[2]
        least = max(self.least_pairs(length, 0.0), self.least_pairs_of_auto(length))
        return query.shape[0] >= least

    def _backward_of(self, call: BackwardCall) -> None:
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        found: Gradients = backward(
            *(call.grad, call.query, call.key, call.value, call.out, call.logsumexp, None, None),
            *(call.query.shape[-2], call.key.shape[-2]),
            *(call.settings.dropout_p, call.settings.is_causal, *call.state),
            scale=call.settings.scale,
        )
        _write(found, call.into)

    def state_after(self, state: Sequence[Tensor], num_pairs: int) -> Sequence[Tensor]:
        """Return the state with the offset behind *num_pairs* pairs; the seed stays."""
        seed_and_offset, unused = state
        if not num_pairs:
            return state
        moved = seed_and_offset.clone()
        moved.view(torch.int64)[1:].add_(32 * num_pairs)
        return moved, unused

    def empty_outputs(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp as forward allocates them for all of *query*."""
        return _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def empty_gradients(self, *inputs: Tensor) -> Gradients:
        """Return the gradients of query, key and value as backward allocates them."""
        query, key, value = map(_like, inputs)
        return query, key, value


@dataclass(frozen=True)
class NoKernel:
    """Why a call of attention is left to torch."""

    reason: str
    remedy: str = ""
    """What makes torch choose a kernel that runs in groups; empty if nothing is known to."""


def chosen_kernel(
    query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, *, enable_gqa: bool
) -> Kernel | NoKernel:
    """Return the kernel that torch chooses for a call without a mask, or why it is left to torch.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key-value heads, length of the keys, head_dim).
        value: as *key*.
        settings: what the call says besides.
        enable_gqa: as ``scaled_dot_product_attention`` takes it.
    """
    try:
        backend = _choice(query, key, value, settings, enable_gqa)
    except (RuntimeError, NotImplementedError):
        device = query.device.type
        return NoKernel(f"torch does not say which kernel it chooses on {device!r}")
    if backend != SDPBackend.FLASH_ATTENTION.value:
        return _OTHERS.get(backend, NoKernel("torch chooses a kernel that is not known"))
    if query.device.type == "cpu":
        return Kernel()
    return flash_kernel_of(query, settings_of(query.device))


def _choice(
    query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, enable_gqa: bool
) -> int:
    """Return the number of the backend that torch chooses, unseen by dispatch modes."""
    is_fake = any(isinstance(each, FakeTensor) for each in (query, key, value))
    with contextlib.nullcontext() if is_fake else torch._C._DisableTorchDispatch():
        return torch._fused_sdp_choice(
            query,
            key,
            value,
            None,
            settings.dropout_p,
            settings.is_causal,
            scale=settings.scale,
            enable_gqa=enable_gqa,
        )


def flash_kernel_of(query: Tensor, device: KernelSettings) -> FlashKernel | NoKernel:
    """Return flash attention on *device*, or why groups may not use it there.

    Args:
        query: what the kernel is given.
        device: the device and the process.
    """
    if torch.version.hip is not None:
        return NoKernel("ROCm's flash attention is not known to give the same bits in parts")
    if query.shape[-1] % 8:
        return NoKernel("torch pads the head dimension, which is no multiple of 8")
    if device.flash_version != 2:
        version = f"FlashAttention-{device.flash_version}"
        return NoKernel(f"{version} is not known to give the same bits in parts")
    return FlashKernel(device)


_OTHERS = {
    SDPBackend.MATH.value: NoKernel("torch chooses its own formula, which no kernel computes"),
    SDPBackend.EFFICIENT_ATTENTION.value: NoKernel("torch chooses its memory-efficient kernel"),
    SDPBackend.CUDNN_ATTENTION.value: NoKernel(
        "torch chooses cuDNN's kernel, which is not known to give the same bits in parts",
        remedy="torch.backends.cuda.enable_cudnn_sdp(False) makes it choose flash attention",
    ),
}


def _write(found: Gradients, into: Gradients) -> None:
    for whole, part in zip(into, found, strict=True):
        whole.copy_(part)


def _of_query_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Return room for the gradients of a key-value head, one for each query head.

    Laid out as (batch, length, heads, head_dim), as ``mha_bwd`` does.
    """
    batch, _, length, width = tensor.shape
    return tensor.new_empty((batch, length, num_heads, width)).transpose(1, 2)


def _like(tensor: Tensor) -> Tensor:
    """Return an empty tensor as ``empty_like`` allocates it inside of the kernels.

    It has the strides of *tensor* where that is dense, and else their order. It is no view, so that
    what autograd returns may be changed in place as the kernel's may.
    """
    shape, strides = tensor.shape, tensor.stride()
    dense, num_elements = list(strides), 1
    is_dense = True
    for dim in sorted(range(tensor.dim()), key=lambda dim: (strides[dim], shape[dim])):
        is_dense &= shape[dim] == 1 or strides[dim] == num_elements
        dense[dim] = num_elements
        num_elements *= shape[dim]
    return tensor.new_empty_strided(shape, strides if is_dense else dense)


def _tokens_first(tensor: Tensor) -> Tensor:
    """Return an empty tensor like *tensor*, laid out as (batch, length, heads, head_dim)."""
    _, heads, length, width = tensor.shape
    strides = (length * heads * width, width, heads * width, 1)
    return tensor.new_empty_strided(tensor.shape, strides)
