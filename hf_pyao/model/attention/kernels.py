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

Three = tuple[Tensor, Tensor, Tensor]


class AttentionCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``.

    Query has shape (batch, heads, length, head_dim), key and value (batch, key-value heads, length
    of the keys, head_dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention: PyTorch's flash attention for CPUs, which allocates little inside."""

    is_deterministic = False
    """Whether backward takes an algorithm whose bits depend on how many pairs there are."""

    def least_pairs(self, call: AttentionCall, *, is_auto: bool) -> int:
        """Return the fewest pairs of a sample and a query head with which bits stay the same.

        Args:
            call: all pairs.
            is_auto: they are to fill the device well, too.
        """
        return 1

    def pair_bytes(self, call: AttentionCall) -> int:
        """Return what backward allocates inside for one sample and one key-value head, in bytes."""
        return 0

    def forward(self, call: AttentionCall) -> tuple[Tensor, ...]:
        """Return the output, the logsumexp of each row (float32), and the state of dropout."""
        found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *call[:3], call.dropout_p, call.is_causal, scale=call.scale
        )
        return found

    def backward(
        self, call: AttentionCall, given: Three, state: Sequence[Tensor], into: Three
    ) -> None:
        """Write the gradients of query, key and value.

        Args:
            call: a group.
            given: of its queries the gradient of the output, the output, and the logsumexp.
            state: of dropout, from :meth:`state_after`.
            into: tensors of the shapes of query, key and value, which are written to.
        """
        grad, out, logsumexp = given
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = (grad, *call[:3], out, logsumexp)
        found = backward(*tensors, call.dropout_p, call.is_causal, scale=call.scale)
        for whole, part in zip(into, found, strict=True):
            whole.copy_(part)

    def state_after(self, state: Sequence[Tensor], num_pairs: int) -> Sequence[Tensor]:
        """Return the state of dropout for the group behind *num_pairs* sample-head pairs."""
        return state

    def empty_outputs(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp as forward allocates them for all of *query*."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        options: Any = {"dtype": dtype, "device": query.device}
        rows = torch.empty_permuted(query.shape[:3], (0, 2, 1), **options)
        return torch.empty_like(query), rows

    def empty_gradients(self, call: AttentionCall) -> Three:
        """Return the gradients of query, key and value as backward allocates them."""
        query, key, value = (
            torch.empty_permuted(each.shape, (0, 2, 1, 3), dtype=each.dtype, device=each.device)
            for each in call[:3]
        )
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

    @property
    def is_deterministic(self) -> bool:  # type: ignore[override]
        """Whether splits of backward's sums depend on how many pairs there are."""
        return self.device.is_deterministic

    def least_pairs(self, call: AttentionCall, *, is_auto: bool) -> int:
        """Return the fewest pairs of a sample and a query head with which bits stay the same."""
        filling = -(-8 * self.device.multiprocessors // 5)  # ceil(0.8 x 2 x multiprocessors)
        waves = WAVES_OF_AUTO if is_auto else 0 if call.dropout_p else 1  # dropout never splits
        unsplit = -(-waves * filling // -(-call.query.shape[2] // 64))
        return max(1, unsplit, self.device.multiprocessors if self.is_deterministic else 1)

    def pair_bytes(self, call: AttentionCall) -> int:
        """Return what backward allocates inside for one sample and one key-value head, in bytes."""
        _, heads, length, width = call.query.shape
        _, key_heads, keys, _ = call.key.shape
        itemsize = call.query.element_size()
        shape = AttentionShape(1, heads // key_heads, 1, length, keys, width, width, itemsize)
        whole = self.device._replace(is_deterministic=False)  # of many pairs, with one split
        return sum(flash_backward(shape, whole).values())

    def forward(self, call: AttentionCall) -> tuple[Tensor, ...]:
        """Return output, logsumexp, and the two tensors of the random number generator's state."""
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            *call[:3], call.dropout_p, call.is_causal, False, scale=call.scale
        )
        return found[0], found[1], found[6], found[7]

    def backward(
        self, call: AttentionCall, given: Three, state: Sequence[Tensor], into: Three
    ) -> None:
        """Write the gradients; query heads one by one where one of them fills the device."""
        num_samples, num_heads, _, width = call.query.shape
        has_gaps = num_samples > 1 and call.dropout_p  # in the order of one head's masks
        if call.key.shape[1] > 1 or num_heads == 1 or has_gaps or not self._is_filled_by(call):
            self._backward_of(call, given, state, into)
            return
        keys, values = (  # for each query head, laid out as ``mha_bwd`` does
            each.new_empty(num_samples, each.shape[2], num_heads, width).transpose(1, 2)
            for each in (call.key, call.value)
        )
        for head in range(num_heads):
            part = (slice(None), slice(head, head + 1))
            grad, out, logsumexp = (each[part] for each in given)
            self._backward_of(
                call._replace(query=call.query[part]),
                (grad, out, logsumexp),
                self.state_after(state, head) if call.dropout_p else state,
                (into[0][part], keys[part], values[part]),
            )
        torch.sum(keys, 1, out=into[1][:, 0])
        torch.sum(values, 1, out=into[2][:, 0])

    def _is_filled_by(self, call: AttentionCall) -> bool:
        """Say whether one query head of each sample fills the device well."""
        return call.query.shape[0] >= self.least_pairs(call, is_auto=True)

    def _backward_of(
        self, call: AttentionCall, given: Three, state: Sequence[Tensor], into: Three
    ) -> None:
        grad, out, logsumexp = given
        lengths = call.query.shape[-2], call.key.shape[-2]
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        tensors = (grad, *call[:3], out, logsumexp, None, None, *lengths)
        found = backward(*tensors, call.dropout_p, call.is_causal, *state, scale=call.scale)
        for whole, part in zip(into, found, strict=True):
            whole.copy_(part)

    def state_after(self, state: Sequence[Tensor], num_pairs: int) -> Sequence[Tensor]:
        """Return the state with the offset behind *num_pairs* pairs; the seed stays."""
        if not num_pairs:
            return state
        moved = state[0].clone()  # seed and offset
        moved.view(torch.int64)[1:].add_(32 * num_pairs)
        return moved, state[1]

    def empty_outputs(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp as forward allocates them for all of *query*."""
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def empty_gradients(self, call: AttentionCall) -> Three:
        """Return the gradients of query, key and value as backward allocates them."""
        return (
            torch.empty_like(call.query),
            torch.empty_like(call.key),
            torch.empty_like(call.value),
        )


class NoKernel(NamedTuple):
    """Why a call of attention is left to torch."""

    reason: str
    remedy: str = ""
    """What makes torch choose a kernel that runs in groups; empty if nothing is known to."""


def chosen_kernel(call: AttentionCall) -> Kernel | NoKernel:
    """Return the kernel that torch chooses for a call without a mask, or why it is torch's."""
    is_fake = any(isinstance(each, FakeTensor) for each in call[:3])
    try:
        # Unseen by dispatch modes.
        with contextlib.nullcontext() if is_fake else torch._C._DisableTorchDispatch():
            choose: Any = torch._fused_sdp_choice
            number = choose(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
            backend = SDPBackend(number)
    except (RuntimeError, NotImplementedError):
        device = call.query.device.type
        return NoKernel(f"torch does not say which kernel it chooses on {device!r}")
    if backend != SDPBackend.FLASH_ATTENTION:
        return other_kernel(backend)
    if call.query.device.type == "cpu":
        return Kernel()
    return flash_kernel_of(call.query, settings_of(call.query.device))


def other_kernel(backend: SDPBackend) -> NoKernel:
    """Return why groups may not use what torch calls *backend*."""
    return NoKernel(
        f"torch chooses {backend.name}, which is not known to give the same bits in parts",
        "torch.backends.cuda.enable_cudnn_sdp(False) makes it choose flash attention"
        if backend == SDPBackend.CUDNN_ATTENTION
        else "",
    )


def flash_kernel_of(query: Tensor, device: KernelSettings) -> FlashKernel | NoKernel:
    """Return flash attention on *device*, or why groups may not use it there."""
    if query.shape[-1] % 8:
        return NoKernel("torch pads the head dimension, which is no multiple of 8")
    if torch.version.hip is not None or device.flash_version != 2:
        name = "ROCm's" if torch.version.hip is not None else f"version {device.flash_version} of"
        return NoKernel(f"{name} flash attention is not known to give the same bits in parts")
    return FlashKernel(device)
