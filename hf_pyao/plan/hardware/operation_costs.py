"""What an operation costs: its arithmetic and its traffic with the device's memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry


class OperationCost(NamedTuple):
    """Arithmetic and memory traffic of one operation."""

    flops: float
    nbytes: int
    """Bytes that it reads, each tensor once, and bytes that it writes."""


def cost_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    inputs: Iterable[torch.Tensor],
    outputs: Iterable[torch.Tensor],
) -> OperationCost | None:
    """Return the cost of a dispatched operation; None if it runs no kernel.

    Args:
        func: the overload that was called.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        inputs: all tensors among the arguments.
        outputs: all tensors among the results; an operation in place returns what it has written.
    """
    facts = _facts_of(func)
    if facts.is_free:
        return None
    outputs = [*outputs]
    flops = _flops_of(func, args, kwargs, result, outputs)
    if flops and facts.causal_at is not None:
        position = facts.causal_at
        # Kernels skip the half of the scores that is masked; formulas count it.
        if args[position] if position < len(args) else kwargs.get("is_causal", False):
            flops /= 2
    overwritten = _overwritten_by(func, facts, args, kwargs)
    read = {id(each): each for each in inputs if id(each) not in overwritten}
    moved = (*read.values(), *outputs)
    return OperationCost(flops, sum(t.numel() * t.element_size() for t in moved))


def _flops_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    outputs: Sequence[torch.Tensor],
) -> float:
    facts = _facts_of(func)
    if facts.left is not None:
        return 2.0 * outputs[0].numel() * int(args[facts.left].shape[-1])
    if facts.is_grouped:
        return _grouped_flops(*args[:2])
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0
    # Products with sums in another dtype: formulas do not know that argument.
    known = [arg for arg in _with_all_heads(func, args) if not isinstance(arg, torch.dtype)]
    return float(count(*known, **kwargs, out_val=result))


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the operations of a grouped product: each row meets the matrix of its group alone.

    Args:
        left: shape (rows, inner), or (groups, rows, inner).
        right: shape (inner, columns), or (groups, inner, columns).
    """
    num_groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2.0 * num_groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def dequantisation_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the memory traffic of dequantising the weight of a 4-bit product; 0 for others.

    Above a few hundred rows the product dequantises the whole weight, which it then reads
    (bitsandbytes 0.50, ``backends/cuda/ops.py``, ``gemm_4bit``): nothing else runs meanwhile.

    Args:
        func: the overload that was called.
        args: its arguments: rows, packed weight, shape of the weight, scales.
    """
    if func.name() != "bitsandbytes::gemm_4bit":
        return 0
    rows, packed, shape = args[:3]
    return int(packed.nbytes + 2 * math.prod(shape) * rows.itemsize)


def _overwritten_by(
    func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[int]:
    """Return the ids of the arguments that an operation writes and does not read."""
    if not facts.overwritten:
        return set()
    written: set[int] = set()
    read: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        (written if position in facts.overwritten else read).add(id(given))
    return written - read


@dataclass(frozen=True, slots=True)
class _Facts:
    """What never changes of an operation."""

    is_question: bool
    is_free: bool
    """True if it runs no kernel."""
    left: int | None
    """Which argument of a product of matrices is the left one, whose rows are summed over."""
    is_grouped: bool
    overwritten: frozenset[int]
    """Positions of the arguments that it writes without reading them."""
    causal_at: int | None
    """Position of its ``is_causal``."""


@functools.cache
def _facts_of(func: Any) -> _Facts:
    packet, arguments = func._overloadpacket, func._schema.arguments
    name = packet.__name__
    is_mark = func.namespace in ("prim", "profiler")
    is_question = is_mark or name.startswith("sym_") or name == "_fused_sdp_choice"
    names = [argument.name for argument in arguments]
    return _Facts(
        is_question=is_question,
        is_free=is_question or func.is_view or packet in _FREE,
        left=0 if func.name() in _QUANTISED_PRODUCTS else _LEFT.get(packet),
        is_grouped=name in _GROUPED_PRODUCTS,
        overwritten=frozenset(
            position
            for position, argument in enumerate(arguments)
            if argument.is_out or (not position and packet in _OVERWRITING)
        ),
        causal_at=names.index("is_causal") if "is_causal" in names else None,
    )


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an attention kernel with shapes in place of grouped keys and values.

    With as many heads as the queries have: up to torch 2.11 formulas refuse fewer.
    """
    if not func._overloadpacket.__name__.startswith("_scaled_dot_product"):
        return args
    names = [argument.name for argument in func._schema.arguments[: len(args)]]
    if "value" not in names or args[names.index("query")].dim() != 4:
        return args
    heads = args[names.index("query")].shape[1]
    return tuple(
        torch.Size((arg.shape[0], heads, *arg.shape[2:])) if name in ("key", "value") else arg
        for name, arg in zip(names, args, strict=True)
    )


def is_question(func: Any) -> bool:
    """Say whether an operation computes nothing, and modes see it all the same.

    It asks about tensors, such as their device, or marks a range for a profiler.
    """
    return _facts_of(func).is_question


_QUANTISED_PRODUCTS = frozenset(
    {
        *("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"),
        *("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm"),
        "bitsandbytes::int8_mixed_scaled_mm",
    }
)
"""Products with a quantised weight, for which torch has no formula; inputs come first."""

_LEFT = {torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1}
"""Which argument of a product of matrices is the left one, whose rows are summed over."""

_GROUPED_PRODUCTS = frozenset({"_grouped_mm", "grouped_mm_fallback", "_scaled_grouped_mm"})
"""Products of groups of rows with a matrix for each group, for which torch has no formula."""

_OVERWRITING = frozenset(
    {
        *(torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_),
        *(torch.ops.aten.normal_, torch.ops.aten.uniform_, torch.ops.aten.random_),
        *(torch.ops.aten.bernoulli_, torch.ops.aten.exponential_),
    }
)
"""Operations that write their first argument without reading it."""

_FREE = frozenset(
    {
        torch.ops.aten.detach,
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
        torch.ops.aten.set_,
        torch.ops.aten._unsafe_view,
    }
)
"""Operations that run no kernel."""
