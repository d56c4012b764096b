"""Attention that runs one group of samples and heads after the other (see [Note: Groups]).

Forward writes each group's output and logsumexp into one tensor each, and autograd saves what it
saves for one kernel, in the same order: key, query, value, logsumexp, output, the state of dropout.
Backward writes each group's gradients into one dq, dk and dv. What a kernel allocates inside, and
the results of one group that are copied, exist for one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_pyao.engine.recompute.kept_attention import run_as_one_kernel
from hf_pyao.model.attention.kernels import AttentionCall, Kernel
from hf_pyao.plan.options.group_plan import Group, GroupPlan


def attention_in_groups(kernel: Kernel, plan: GroupPlan, call: AttentionCall) -> Tensor:
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
        ctx: Any, kernel: Kernel, plan: GroupPlan, options: tuple[Any, ...], *tensors: Tensor
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
        wholes = kernel.empty_gradients(call)
        for group in plan.groups():
            part, of_query, of_key = _part_of(call, group)
            kernel.backward(
                part,
                (grad[of_query], out[of_query], logsumexp[of_query]),
                kernel.state_after(state, num_pairs) if call.dropout_p else state,
                (wholes[0][of_query], wholes[1][of_key], wholes[2][of_key]),
            )
            num_pairs += part.query.shape[0] * part.query.shape[1]
        return (None, None, None, *wholes)


def _run_forward(kernel: Kernel, plan: GroupPlan, call: AttentionCall) -> tuple[Tensor, ...]:
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
