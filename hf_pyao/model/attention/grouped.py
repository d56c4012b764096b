"""Attention that runs one group of samples and heads after the other (see [Note: Groups]).

Forward writes each group's output and logsumexp into one tensor each, and autograd saves what it
saves for one kernel, in the same order: key, query, value, logsumexp, output, the state of dropout.
Backward writes each group's gradients into one dq, dk and dv. What a kernel allocates inside, and
the results of one group that are copied, exist for one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_pyao.engine.recompute.kept_attention import run_as_one_kernel
from hf_pyao.errors import ConflictError
from hf_pyao.model.attention.kernels import AttentionSettings, BackwardCall, Kernel
from hf_pyao.plan.options.group_plan import Group, GroupPlan


@dataclass(frozen=True)
class GroupedCall:
    """One call of attention in groups."""

    kernel: Kernel
    plan: GroupPlan
    settings: AttentionSettings


def attention_in_groups(call: GroupedCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return scaled dot-product attention, one group after the other.

    Differentiable once, as the kernels are.

    Args:
        call: the kernel, its groups and settings.
        query: (batch, heads, length, head_dim).
        key: (batch, key-value heads, length of the keys, head_dim).
        value: as *key*.

    Returns:
        (batch, heads, length, head_dim), with the strides that the kernel gives.
    """
    result: Tensor = _AttentionInGroups.apply(call, query, key, value)  # type: ignore[no-untyped-call]
    return result


class _AttentionInGroups(torch.autograd.Function):
    """Runs a kernel for each group, and its backward for each group."""

    @staticmethod
    def forward(ctx: Any, call: GroupedCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of all groups."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        out, logsumexp, *state = run_as_one_kernel(
            _run_forward, (call, query, key, value), draws=call.settings.dropout_p > 0
        )
        ctx.save_for_backward(key, query, value, logsumexp, out, *state)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        if grad is None:
            return (None,) * 4
        found = _Gradients.apply(ctx.call, grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *found  # autograd drops those of inputs that need none


class _Gradients(torch.autograd.Function):
    """The gradients, as a node of its own: where they are differentiated, it refuses by name."""

    @staticmethod
    def forward(ctx: Any, call: GroupedCall, grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        """Run the kernel's backward for each group."""
        return _run_backward(call, grad, *saved)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        """Refuse."""
        raise ConflictError(
            "the gradients of attention in groups are differentiated again (create_graph=True), "
            "which the kernels of attention cannot do, in groups or not. For second derivatives "
            "give attention_groups='off' and use torch's formula: "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
            key="second-derivatives",
        )


def _run_forward(
    call: GroupedCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Return output, logsumexp and the state of dropout."""
    kernel = call.kernel
    wholes = kernel.empty_outputs(query)
    state: Sequence[Tensor] | None = None
    for group in call.plan.groups():
        of_query, of_key = _parts_of(group, query, key)
        out, logsumexp, *state_of_group = kernel.forward(
            query[of_query], key[of_key], value[of_key], call.settings
        )
        state = state_of_group if state is None else state
        wholes[0][of_query] = out
        wholes[1][of_query] = logsumexp
        del out, logsumexp
    return *wholes, *(state or ())


def _run_backward(
    call: GroupedCall,
    grad: Tensor,
    key: Tensor,
    query: Tensor,
    value: Tensor,
    logsumexp: Tensor,
    out: Tensor,
    *state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    kernel, num_pairs = call.kernel, 0
    wholes = kernel.empty_gradients(query, key, value)
    whole = BackwardCall(grad, query, key, value, out, logsumexp, state, call.settings, wholes)
    for group in call.plan.groups():
        of_query, of_key = _parts_of(group, query, key)
        part = whole.of_queries(of_query)._replace(
            key=key[of_key],
            value=value[of_key],
            into=(wholes[0][of_query], wholes[1][of_key], wholes[2][of_key]),
        )
        if call.settings.dropout_p:
            part = part._replace(state=kernel.state_after(state, num_pairs))
        kernel.backward(part)
        num_pairs += part.query.shape[0] * part.query.shape[1]
    return wholes


def _parts_of(
    group: Group, query: Tensor, key: Tensor
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return where a group lies in what has the query's heads, and in what has the key's."""
    ratio = query.shape[1] // key.shape[1]
    samples = slice(group.first_sample, group.end_sample)
    heads = slice(group.first_head, group.end_head)
    return (samples, slice(heads.start * ratio, heads.stop * ratio)), (samples, heads)
