"""Which operations treat tokens one by one, and where the tokens are in what they return.

Every rule gets one operation and returns the place of the tokens in each tensor that the operation
returns. If the operation mixes tokens, the rule raises :class:`NotTokenWise`. Operations without a
rule are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Dimensions that the tokens lie in: in order, none other between them."""

    start: int
    stop: int

    def shifted(self, by: int) -> Rows:
        """Return the same, *by* dimensions further right."""
        return Rows(self.start + by, self.stop + by)


class NotTokenWise(Exception):
    """The tokens meet; says where."""


class Operation(NamedTuple):
    """One operation as it was called."""

    name: str
    arguments: dict[str, Any]
    """By the names of the schema; defaults left out."""
    result: Any
    leads: tuple[int, ...]
    """Sizes of the dimensions that the tokens came in: primes that no other dimension has."""
    rows_of: Callable[[Any], Rows | None]
    """Where the tokens are in an argument; None if it is the same for all tokens."""

    def tracked(self) -> list[tuple[Tensor, Rows]]:
        """Return the arguments that hold tokens, and where."""
        leaves = torch.utils._pytree.tree_leaves(list(self.arguments.values()))
        found = [(leaf, self.rows_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        return [(leaf, rows) for leaf, rows in found if rows is not None]

    def refuse(self, why: str) -> NotTokenWise:
        """Build the refusal of this operation."""
        return NotTokenWise(f"{self.name} {why}")


Rule = Callable[[Operation], Any]
"""Returns the rows of the result: for one tensor, or a list of them for several."""


def place_rows(shape: Sequence[int], before: int, leads: Sequence[int]) -> Rows | None:
    """Return where *leads* lie in *shape*, *before* elements left of them; None if nowhere whole.

    Neighbours among *leads* may be one dimension.
    """
    start, product = 0, 1
    while product < before and start < len(shape):
        product *= shape[start]
        start += 1
    if product != before:
        return None
    while start < len(shape) and shape[start] == 1:
        start += 1
    left, stop = list(leads), start
    while left:
        if stop == len(shape):
            return None
        size, stop = shape[stop], stop + 1
        while size > 1 and left and size % left[0] == 0:
            size //= left.pop(0)
        if size != 1:
            return None
    return Rows(start, stop)


def _only(operation: Operation) -> tuple[Tensor, Rows]:
    """Return the one argument that holds tokens."""
    tracked = operation.tracked()
    if len(tracked) != 1:
        raise operation.refuse("combines tensors of tokens")
    return tracked[0]


def same_place(operation: Operation) -> Any:
    """Work element by element: tensors are aligned at their last dimensions."""
    places = {Rows(t.dim() - rows.start, t.dim() - rows.stop) for t, rows in operation.tracked()}
    if len(places) != 1:
        raise operation.refuse("brings tokens together that are in different dimensions")
    (place,) = places
    results = operation.result if isinstance(operation.result, tuple | list) else [operation.result]
    return [Rows(r.dim() - place.start, r.dim() - place.stop) for r in results]


def reshaped(operation: Operation) -> Any:
    """Lie otherwise, with the tokens in dimensions of their own."""
    tensor, rows = _only(operation)
    before = math.prod(tensor.shape[: rows.start])
    found = place_rows(operation.result.shape, before, operation.leads)
    if found is None:
        raise operation.refuse("mixes tokens with other dimensions")
    return [found]


def permuted(operation: Operation) -> Any:
    """Reorder dimensions, those of the tokens together."""
    tensor, rows = _only(operation)
    order = list(range(tensor.dim()))
    arguments = operation.arguments
    if "dims" in arguments:
        order = [dim % tensor.dim() for dim in arguments["dims"]]
    elif tensor.dim() > 1:
        first = arguments.get("dim0", 0) % tensor.dim()
        second = arguments.get("dim1", 1) % tensor.dim()
        order[first], order[second] = order[second], order[first]
    found = [order.index(dim) for dim in range(rows.start, rows.stop) if tensor.shape[dim] > 1]
    if found != list(range(found[0], found[0] + len(found))):
        raise operation.refuse("moves tokens among other dimensions")
    return [Rows(found[0], found[-1] + 1)]


def along_dims(operation: Operation) -> Any:
    """Reduce, sort, cut or normalise over dimensions without tokens."""
    arguments = operation.arguments
    dims = arguments.get("dim", arguments.get("dims"))
    if dims is None and operation.name in _FIRST_BY_DEFAULT:
        dims = 0
    elif dims is None and operation.name in _LAST_BY_DEFAULT:
        dims = -1
    if dims is None or dims == []:
        raise operation.refuse("reduces over all tokens")
    results = operation.result if isinstance(operation.result, tuple | list) else [operation.result]
    found: list[Rows] = []
    for tensor, rows in operation.tracked():
        given = [dims] if isinstance(dims, int) else list(dims)
        wrapped = sorted(dim % tensor.dim() for dim in given)
        if any(result.shape == tensor.shape for result in results) and "slice" in operation.name:
            return [rows]  # all of it
        if any(rows.start <= dim < rows.stop for dim in wrapped):
            raise operation.refuse(f"works over tokens (dimension {given[0]})")
        gone = 0
        if results[0].dim() < tensor.dim():
            gone = sum(dim < rows.start for dim in wrapped)
        found.append(rows.shifted(-gone))
    if len(set(found)) != 1:
        raise operation.refuse("brings tokens together that are in different dimensions")
    return [found[0]] * len(results)


def stacked(operation: Operation) -> Any:
    """Put tensors beside each other in a new dimension."""
    dim = operation.arguments.get("dim", 0) % operation.result.dim()
    places = {rows for _, rows in operation.tracked()}
    if len(places) != 1:
        raise operation.refuse("brings tokens together that are in different dimensions")
    (rows,) = places
    if rows.start < dim < rows.stop:
        raise operation.refuse("mixes tokens with other dimensions")
    return [rows.shifted(1) if dim <= rows.start else rows]


def matrix_product(operation: Operation) -> Any:
    """Multiply rows by a matrix that is the same for all of them."""
    arguments = operation.arguments
    right = arguments.get("mat2", arguments.get("batch2", arguments.get("weight")))
    left = arguments.get("mat1", arguments.get("batch1", arguments.get("input")))
    added = arguments.get("self") if left is not None else arguments.get("bias")
    left = arguments["self"] if left is None else left
    rows = operation.rows_of(left)
    others = [operation.rows_of(other) for other in (right, added) if isinstance(other, Tensor)]
    is_batch = rows == Rows(0, 1) and left.dim() == 3
    if rows is not None and rows.stop < left.dim():
        if all(other is None for other in others):
            return [rows]
        if (is_batch or operation.rows_of(right) is None) and all(
            o in (None, rows) for o in others
        ):
            return [rows]
    raise operation.refuse("multiplies tokens with each other")


def layer_norm(operation: Operation) -> Any:
    """Normalise over the last dimensions."""
    tensor, rows = _only(operation)
    if rows.stop > tensor.dim() - len(operation.arguments["normalized_shape"]):
        raise operation.refuse("normalises over tokens")
    results = operation.result if isinstance(operation.result, tuple | list) else [operation.result]
    return [rows] * len(results)


def made(operation: Operation) -> Any:
    """Make a tensor of one number: of tokens if it has their sizes."""
    shape = operation.result.shape
    if not has_lead(shape, operation.leads):
        return [None]
    found = place_rows(shape, 1, operation.leads)
    if found is None:
        raise operation.refuse("makes a tensor that mixes tokens with other dimensions")
    return [found]


def has_lead(shape: Sequence[int], leads: Sequence[int]) -> bool:
    """Whether one of the dimensions has tokens, going by its size."""
    return any(size % lead == 0 for size in shape for lead in leads if size)


_FIRST_BY_DEFAULT = {
    *("aten.slice", "aten.split", "aten.split_with_sizes", "aten.cat", "aten.unbind"),
    "aten.chunk",
}
_LAST_BY_DEFAULT = {"aten.topk", "aten.sort", "aten.glu"}


def _rules() -> dict[str, Rule]:
    table: dict[Rule, str] = {
        # Those with the tag "pointwise" need no line.
        same_place: "clone contiguous detach alias lift_fresh lift_fresh_copy _to_copy copy_ copy "
        "native_dropout bernoulli bernoulli_ dropout zeros_like ones_like empty_like full_like "
        "rand_like randn_like fill_ zero_ expand expand_copy native_dropout_backward normal_ "
        "uniform_ resolve_conj resolve_neg",
        reshaped: "view _unsafe_view reshape unsqueeze squeeze flatten unflatten _reshape_alias "
        "view_copy",
        permuted: "permute transpose t transpose_ t_ unsqueeze_",
        along_dims: "sum mean amax amin var std logsumexp _softmax _log_softmax softmax "
        "log_softmax linalg_vector_norm norm topk sort max min argmax argmin cumsum any all prod "
        "slice split split_with_sizes unbind chunk narrow select cat gather glu flip roll "
        "var_mean safe_softmax _safe_softmax",
        stacked: "stack",
        matrix_product: "mm addmm bmm baddbmm linear _addmm_activation",
        layer_norm: "native_layer_norm layer_norm _fused_rms_norm rms_norm",
        made: "new_zeros new_ones new_empty new_full zeros ones empty full new_empty_strided "
        "empty_strided",
    }
    return {f"aten.{name}": rule for rule, names in table.items() for name in names.split()}


RULES = _rules()
"""Operation, without its overload -> rule."""

NUMBERS_OF_SIZES = {"reshaped", "made", "permuted", "along_dims", "stacked", "layer_norm"}
"""Rules whose integers are sizes and dimensions, and not operands."""


def rule_of(func: Any) -> Rule | None:
    """Return the rule of *func*; None if it is not known to treat tokens one by one."""
    name = f"{func.namespace}.{func._opname}"
    if name in RULES:
        return RULES[name]
    return same_place if torch.Tag.pointwise in func.tags else None
