"""Fused experts, streamed by group.

[Note: Groups of experts]
transformers keeps the experts of a layer in parameters whose first dimension counts them, and has
several functions that compute with them (``config._experts_implementation``). Three of these read
such a parameter in ways that can be answered group by group, so that only a group of experts has to
be on the device. Their code runs as it is. What it finds in place of the parameter is an
:class:`ExpertsInGroups`, which answers:

- ``parameter[number]`` ("eager", one expert after another): a view of the block that has its group;
- ``grouped_mm(rows, parameter, offs)`` ("grouped_mm", rows sorted by expert): the same product for
  one group of experts after another, each into its rows of the result; and for the gradient of the
  rows in reverse order;
- ``parameter[numbers]`` ("batched_mm", a copy of an expert's weights for each row): gathered from
  one group after another.

The rows of a group are known on the host only once the router has run: a layer waits for the device
once for each product. A group without rows is not brought.

Under "eager" an expert's weights are read together, so that a group has those of all parameters;
else each parameter has groups of its own. Other implementations, and other classes of experts, make
one kernel of all experts: then all weights of the layer are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_pyao.engine.weights.blocks import ExpertGroups, Weight
from hf_pyao.engine.weights.expert_groups import experts_per_group
from hf_pyao.engine.weights.ring import WeightRing
from hf_pyao.errors import ConflictError
from hf_pyao.model.patching.exchanged_forwards import has_forward_of_its_own

_DECORATED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What ``transformers.integrations.moe.use_experts_implementation`` leaves on a module."""
_EAGER = ("eager", None)
_IMPLEMENTATIONS = (*_EAGER, "grouped_mm", "batched_mm")
_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})


@dataclass(frozen=True, kw_only=True)
class FusedExperts:
    """The parameters of a module of fused experts."""

    names: tuple[str, ...]
    """Of the weights, in the order in which they are read."""
    biases: tuple[str, ...]
    """Of the others; they stay on the device."""
    num_experts: int
    nbytes: tuple[int, ...]
    """Of each of the weights."""
    are_read_together: bool
    """All weights of an expert are read before those of the next."""

    def groups(self, limit_bytes: int, prefix: str) -> list[ExpertGroups]:
        """Return how the weights are divided into groups of at most *limit_bytes*.

        Args:
            limit_bytes: of a group; one expert is the least.
            prefix: of qualified names in the model.
        """
        names = [f"{prefix}.{name}" for name in self.names]
        if self.are_read_together:
            size = experts_per_group(sum(self.nbytes), self.num_experts, limit_bytes)
            return [ExpertGroups(tuple(names), size)]
        return [
            ExpertGroups((name,), experts_per_group(nbytes, self.num_experts, limit_bytes))
            for name, nbytes in zip(names, self.nbytes, strict=True)
        ]


def fused_experts(module: nn.Module) -> FusedExperts | None:
    """Return what may be divided into groups, if *module* has fused experts; else None."""
    anything: Any = module
    if not all(name in vars(module) for name in _DECORATED) or has_forward_of_its_own(module):
        return None
    if getattr(anything.config, "_experts_implementation", None) not in _IMPLEMENTATIONS:
        return None
    names = ("gate_up_proj" if anything.has_gate else "up_proj", "down_proj")
    weights = [module._parameters.get(name) for name in names]
    if not all(each is not None and each.dim() == 3 and each.is_contiguous() for each in weights):
        return None
    found = [each for each in weights if each is not None]
    if len({each.size(0) for each in found}) != 1:
        return None
    return FusedExperts(
        names=names,
        biases=tuple(f"{name}_bias" for name in names),
        num_experts=found[0].size(0),
        nbytes=tuple(each.nbytes for each in found),
        are_read_together=anything.config._experts_implementation in _EAGER,
    )


class ExpertsInGroups:
    """Stands for the weights of all experts, of which a group at a time is on the device.

    Args:
        ring: what brings the groups.
        weight: the whole parameter.
        is_transposed: the last two dimensions are exchanged.
    """

    requires_grad = False

    def __init__(self, ring: WeightRing, weight: Weight, *, is_transposed: bool = False) -> None:
        self._ring = ring
        self._weight = weight
        self._is_transposed = is_transposed
        self.dtype = weight.dtype
        self.device = ring.device
        num_experts, rows, columns = weight.size
        if is_transposed:
            rows, columns = columns, rows
        self.shape = torch.Size((num_experts, rows, columns))

    @property
    def ndim(self) -> int:
        """Three."""
        return len(self.shape)

    def dim(self) -> int:
        """Return three."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of all experts, or one of its dimensions."""
        return self.shape if dim is None else self.shape[dim]

    def data_ptr(self) -> int:
        """Return 0, which is a multiple of any alignment: blocks are aligned."""
        return 0

    def transpose(self, first: int, second: int) -> ExpertsInGroups:
        """Return the same with the last two dimensions exchanged."""
        if {first % 3, second % 3} != {1, 2}:
            raise self._unanswered("transpose")
        return ExpertsInGroups(self._ring, self._weight, is_transposed=not self._is_transposed)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return one expert, for a number; a copy of several, for a vector of numbers."""
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim()):
            number = int(index) % self.shape[0]
            group = self.groups[number // self.group_size]
            return self.of_group(group)[number - _first(group)]
        if isinstance(index, torch.Tensor) and index.dim() == 1 and not index.is_floating_point():
            return self._gathered(index)
        raise self._unanswered(f"indexing by {type(index).__name__}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute a product of rows, sorted by expert, with the experts' weights."""
        options = {name: value for name, value in (kwargs or {}).items() if value is not None}
        name = str(getattr(function, "__name__", function))
        experts = next(each for each in args if isinstance(each, cls))
        if name in _PRODUCTS and len(args) == 2 and args[1] is experts and set(options) == {"offs"}:
            return _Product.apply(args[0], options["offs"], experts, function)  # type: ignore[no-untyped-call]
        raise experts._unanswered(name)

    @property
    def groups(self) -> Sequence[Weight]:
        """The groups, in order."""
        return self._weight.groups

    @property
    def group_size(self) -> int:
        """Experts of each group but the last."""
        return self.groups[0].size[0]

    def of_group(self, group: Weight) -> torch.Tensor:
        """Return the weights of a group's experts, on the device."""
        tensor = self._ring.tensor_of(group)
        return tensor.transpose(-2, -1) if self._is_transposed else tensor

    def _gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(
            (numbers.numel(), *self.shape[1:]), dtype=self.dtype, device=numbers.device
        )
        for group in self.groups:
            first = _first(group)
            here = ((numbers >= first) & (numbers < first + group.size[0])).nonzero().flatten()
            if here.numel():
                rows[here] = self.of_group(group)[numbers[here] - first]
        return rows

    def _unanswered(self, what: str) -> ConflictError:
        return ConflictError(
            f"{self._weight.name!r} is streamed by group of experts, and {what} needs all experts "
            "at once. Give experts_implementation='grouped_mm' when the model is loaded, or "
            "stream_weights='off'.",
            key="experts-all-at-once",
        )


class _Product(torch.autograd.Function):
    """Rows, sorted by expert, times the experts' weights, one group of experts after another."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        offs: torch.Tensor,
        experts: ExpertsInGroups,
        product: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Return the product, shape (rows, columns of an expert's weights).

        Args:
            ctx: autograd's.
            rows: shape (rows, rows of an expert's weights).
            offs: int32, shape (experts,): for each the row behind its last.
            experts: their weights.
            product: of some rows and the weights of a group.
        """
        ctx.ends = offs.tolist()
        ctx.experts, ctx.product = experts, product
        ctx.save_for_backward(offs)
        return _products(rows, offs, ctx.ends, experts, product, list(experts.groups))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Return the gradient of the rows: the last group comes first."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (offs,) = ctx.saved_tensors
        experts = ctx.experts.transpose(-2, -1)
        groups = list(experts.groups)[::-1]
        result = _products(gradient, offs, ctx.ends, experts, ctx.product, groups)
        return result, None, None, None


def _products(
    rows: torch.Tensor,
    offs: torch.Tensor,
    ends: list[int],
    experts: ExpertsInGroups,
    product: Callable[..., torch.Tensor],
    groups: Sequence[Weight],
) -> torch.Tensor:
    result = torch.empty((rows.size(0), experts.shape[2]), dtype=rows.dtype, device=rows.device)
    result[ends[-1] :] = 0  # rows of no expert here
    for group in groups:
        first = _first(group)
        last = first + group.size[0]
        start, end = (ends[first - 1] if first else 0), ends[last - 1]
        if start != end:
            here = offs[first:last] - start
            result[start:end] = product(rows[start:end], experts.of_group(group), offs=here)
    return result


def _first(group: Weight) -> int:
    assert group.experts is not None
    return group.experts[0]
