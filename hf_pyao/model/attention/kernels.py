"""Kernels of attention that give the same bits when they run on a part of samples and heads.

What is known of them is from PyTorch's source: ``aten/src/ATen/native/transformers``, there
``cuda/flash_attn/flash_api.cpp`` (``mha_fwd``, ``mha_bwd``, ``num_splits_heuristic``),
``cuda/attention_backward.cu`` and ``attention.cpp``.

[Note: Attention in groups] Attention runs one group of samples and heads after the other (see
[Note: Groups] in ``group_plan``). Forward writes each group's output and logsumexp into one tensor
each, and autograd saves what it saves for one kernel, in the same order: key, query, value,
logsumexp, output, the state of dropout. Backward writes each group's gradients into one dq, dk and
dv. What a kernel allocates inside, and the results of one group that are copied, exist for one
group at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from hf_pyao.engine.recompute.kept_attention import run_as_one_kernel
from hf_pyao.plan.hardware.attention_workspaces import AttentionShape, flash_backward
from hf_pyao.plan.hardware.kernel_settings import KernelSettings, settings_of
from hf_pyao.plan.options.group_plan import Group, GroupPlan

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


def as_autocast_has_it(tensor: Tensor) -> Tensor:
    """Return *tensor* in the dtype to which autocast, if it is on, casts what attention gets."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


@dataclass(frozen=True)
class FlashKernel:
    """FlashAttention-2 as PyTorch builds it for CUDA; or PyTorch's flash attention for CPUs, whose
    every pair of a sample and a head is computed by itself, and which allocates little inside.

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

    device: KernelSettings | None
    """The device's multiprocessors, and whether the kernel is deterministic; None: a CPU."""

    def least_pairs(self, call: AttentionCall, *, is_auto: bool) -> int:
        """Return the fewest pairs of a sample and a query head with which bits stay the same.

        Args:
            call: all pairs.
            is_auto: they are to fill the device well, too.
        """
        if self.device is None:
            return 1
        num_processors = self.device.multiprocessors
        filling = -(-8 * num_processors // 5)  # ceil(0.8 x 2 x multiprocessors)
        waves = WAVES_OF_AUTO if is_auto else 0 if call.dropout_p else 1  # dropout never splits
        unsplit = -(-waves * filling // -(-call.query.shape[2] // 64))
        return max(1, unsplit, num_processors if self.device.is_deterministic else 1)

    def pair_bytes(self, call: AttentionCall) -> int:
        """Return what backward allocates inside for one sample and one key-value head, in bytes."""
        if self.device is None:
            return 0
        _, heads, length, width = call.query.shape
        _, key_heads, keys, _ = call.key.shape
        itemsize = call.query.element_size()
        shape = AttentionShape(1, heads // key_heads, 1, length, keys, width, width, itemsize)
        whole = self.device._replace(is_deterministic=False)  # of many pairs, with one split
        return sum(flash_backward(shape, whole).values())

    def forward(self, call: AttentionCall) -> tuple[Tensor, ...]:
        """Return output, logsumexp of each row (float32), and the state of dropout."""
        given, scale = (*call[:3], call.dropout_p, call.is_causal), call.scale
        aten: Any = torch.ops.aten
        found: tuple[Tensor, ...]
        if self.device is None:
            found = aten._scaled_dot_product_flash_attention_for_cpu(*given, scale=scale)
            return found
        found = aten._scaled_dot_product_flash_attention(*given, False, scale=scale)
        return found[0], found[1], found[6], found[7]

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
                state_after(state, head) if call.dropout_p else state,
                (into[0][part], keys[part], values[part]),
            )
        torch.sum(keys, 1, out=into[1][:, 0])
        torch.sum(values, 1, out=into[2][:, 0])

    def _is_filled_by(self, call: AttentionCall) -> bool:
        """Say whether one query head of each sample fills the device well."""
        is_cuda = self.device is not None
        return is_cuda and call.query.shape[0] >= self.least_pairs(call, is_auto=True)

    def _backward_of(
        self, call: AttentionCall, given: Three, state: Sequence[Tensor], into: Three
    ) -> None:
        tensors: tuple[Any, ...] = (given[0], *call[:3], *given[1:])
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        if self.device is not None:
            run = torch.ops.aten._scaled_dot_product_flash_attention_backward
            tensors += (None, None, call.query.shape[-2], call.key.shape[-2])
        found = run(*tensors, call.dropout_p, call.is_causal, *state, scale=call.scale)
        for whole, part in zip(into, found, strict=True):
            whole.copy_(part)

    def empty_outputs(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp as forward allocates them for all of *query*."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        order = (0, 2, 1) if self.device is None else (0, 1, 2)
        rows: Any = torch.empty_permuted(query.shape[:3], order, dtype=dtype, device=query.device)
        return torch.empty_like(query), rows

    def empty_gradient(self, tensor: Tensor) -> Tensor:
        """Return the gradient of query, key or value as backward allocates it."""
        if self.device is not None:
            return torch.empty_like(tensor)
        options: Any = {"dtype": tensor.dtype, "device": tensor.device}
        return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), **options)


def state_after(state: Sequence[Tensor], num_pairs: int) -> Sequence[Tensor]:
    """Return the state of dropout for the group behind *num_pairs* pairs; the seed stays."""
    if not num_pairs:
        return state
    moved = state[0].clone()  # seed and offset
    moved.view(torch.int64)[1:].add_(32 * num_pairs)
    return moved, state[1]


class NoKernel(NamedTuple):
    """Why a call of attention is left to torch."""

    reason: str
    remedy: str = ""
    """What makes torch choose a kernel that runs in groups; empty if nothing is known to."""


def chosen_kernel(call: AttentionCall) -> FlashKernel | NoKernel:
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
        return FlashKernel(None)
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


def attention_in_groups(kernel: FlashKernel, plan: GroupPlan, call: AttentionCall) -> Tensor:
    """Return scaled dot-product attention, one group after the other.

    Differentiable once, as the kernels are.

    Args:
        kernel: runs for each group.
        plan: the groups.
        call: tensors of the dtype in which *kernel* computes, and no mask.

    Returns:
        (batch, heads, length, head_dim), with the strides that the kernel gives.
    """
    result: Tensor = _InGroups.apply(kernel, plan, call[3:], *call[:3])  # type: ignore[no-untyped-call]
    return result


class _InGroups(torch.autograd.Function):
    """Runs a kernel for each group, and its backward for each group."""

    @staticmethod
    def forward(
        ctx: Any, kernel: FlashKernel, plan: GroupPlan, options: tuple[Any, ...], *tensors: Tensor
    ) -> Tensor:
        """Return the output of all groups."""
        query, key, value = tensors
        call = AttentionCall(query, key, value, *options)
        ctx.call = kernel, plan, options
        ctx.set_materialize_grads(False)
        out, logsumexp, *state = run_as_one_kernel(
            _run_forward, (kernel, plan, call), draws=call.dropout_p > 0
        )
        ctx.save_for_backward(key, query, value, logsumexp, out, *state)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of query, key and value; autograd drops what needs none."""
        if grad is None:
            return (None,) * 6
        kernel, plan, options = ctx.call
        key, query, value, logsumexp, out, *state = ctx.saved_tensors
        call, num_pairs = AttentionCall(query, key, value, *options), 0
        dq, dk, dv = map(kernel.empty_gradient, call[:3])
        for group in plan.groups():
            part, of_query, of_key = _part_of(call, group)
            kernel.backward(
                part,
                (grad[of_query], out[of_query], logsumexp[of_query]),
                state_after(state, num_pairs) if call.dropout_p else state,
                (dq[of_query], dk[of_key], dv[of_key]),
            )
            num_pairs += part.query.shape[0] * part.query.shape[1]
        return None, None, None, dq, dk, dv


def _run_forward(kernel: FlashKernel, plan: GroupPlan, call: AttentionCall) -> tuple[Tensor, ...]:
    """Return output, logsumexp and the state of dropout."""
    wholes = kernel.empty_outputs(call.query)
    state: Sequence[Tensor] = ()
    for group in plan.groups():
        part, of_query, _ = _part_of(call, group)
        out, logsumexp, *of_group = kernel.forward(part)
        state = state or of_group
        wholes[0][of_query] = out
        wholes[1][of_query] = logsumexp
        del out, logsumexp
    return *wholes, *state


def _part_of(
    call: AttentionCall, group: Group
) -> tuple[AttentionCall, tuple[slice, slice], tuple[slice, slice]]:
    """Return the call of a group, and where it lies among the query's heads and the key's."""
    ratio = call.query.shape[1] // call.key.shape[1]
    samples = slice(group.first_sample, group.end_sample)
    of_query = samples, slice(group.first_head * ratio, group.end_head * ratio)
    of_key = samples, slice(group.first_head, group.end_head)
    query, key, value = call.query[of_query], call.key[of_key], call.value[of_key]
    return call._replace(query=query, key=key, value=value), of_query, of_key
