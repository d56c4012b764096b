"""Which operations of torch may be replayed, and how. Decided once per overload, from its schema.

Only aten operations on a list are replayed: pointwise ones (torch tags them), and those named here.
Everything else is opaque: what it makes or changes must be stored, or is not recomputed. That
holds for collectives, for operations on lists that they change, and for whatever libraries add.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Kind(enum.Enum):
    """What a replay has to know about an operation."""

    VIEW = "view"
    """Another view of the same storage: nothing to replay, since values are storages."""
    CHEAP = "cheap"
    """Makes new tensors from its arguments, in about the time of reading and writing them."""
    PRODUCT = "product"
    """As CHEAP, but a matrix product, convolution or attention: replayed only where asked for."""
    IN_PLACE = "in place"
    """Changes its first argument, and nothing else."""
    FILL = "fill"
    """Overwrites all of its first argument, whatever it held."""
    EMPTY = "empty"
    """Allocates without writing. What fills it may be a kernel that no one sees."""
    OPAQUE = "opaque"
    """Anything else."""


PRODUCTS = frozenset(
    {
        "_convolution",
        "_efficient_attention_forward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "mm",
    }
)
"""Names of operations whose time is that of their arithmetic."""

CHEAP = frozenset(
    {
        "_fused_rms_norm",
        "_log_softmax",
        "_safe_softmax",
        "_softmax",
        "_to_copy",
        "amax",
        "arange",
        "bernoulli",
        "cat",
        "clone",
        "constant_pad_nd",
        "cumsum",
        "flip",
        "full",
        "full_like",
        "gather",
        "index_select",
        "linalg_vector_norm",
        "mean",
        "native_dropout",
        "native_group_norm",
        "native_layer_norm",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "rand_like",
        "randn_like",
        "repeat",
        "roll",
        "scalar_tensor",
        "stack",
        "sum",
        "tril",
        "triu",
        "var",
        "var_mean",
        "zeros",
        "zeros_like",
    }
)
"""Names of cheap operations that torch does not tag as pointwise. All are deterministic."""

FILLS = frozenset(
    {
        "bernoulli_",
        "fill_",
        "normal_",
        "uniform_",
        "zero_",
    }
)
"""Names of operations that overwrite their first argument, most of them with random numbers."""

EMPTIES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Names of operations that allocate only."""

VIEWS = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})
"""Names of operations that return views without saying so in their schema."""

SHAPE_ONLY = frozenset({"full_like", "ones_like", "rand_like", "randn_like", "zeros_like"})
"""Names of operations that read the shape of their first argument alone."""

REINTERPRETING = frozenset({"_conj", "_neg_view", "resize_", "set_", "view_as_complex"})
"""Names of operations behind which a storage's bytes alone no longer say what a tensor holds."""

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operations that return before what they write is there."""


NOTHING = slice(0, 0)
"""No arguments."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known about one operator overload."""

    name: str
    kind: Kind
    is_random: bool
    """True if it draws from a random generator, or may do so."""
    dropout_at: int | None
    """Position of its ``dropout_p``: at 0 it draws nothing."""
    is_mutable: bool
    """True if it changes an argument, as its schema says."""
    unannotated: slice
    """Positions of arguments that it changes though its schema does not say so."""
    ends_later: bool
    """True if what it changes may change after it has returned: a collective."""
    is_shape_only: bool
    """True if it reads the shape of its first argument alone."""
    has_mask: bool
    """True if its second output is drawn without looking at the first argument."""
    is_reinterpreting: bool
    takes_tensor: bool
    """True if its first argument is a tensor."""


class Rules(dict[Any, Rule]):
    """Operator overload -> its rule, found when first asked for."""

    def __missing__(self, func: Any) -> Rule:
        """Work out the rule of *func*."""
        name = func._schema.name.partition("::")[2]
        rule = self[func] = Rule(
            name=name,
            kind=kind_of(func),
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            dropout_at=_position_of("dropout_p", func._schema),
            is_mutable=func._schema.is_mutable,
            unannotated=unannotated_writes(func),
            ends_later=func.namespace in COLLECTIVES,
            is_shape_only=name in SHAPE_ONLY,
            has_mask=name == "native_dropout",
            is_reinterpreting=name in REINTERPRETING,
            takes_tensor=_takes_tensor(func._schema),
        )
        return rule


def kind_of(func: Any) -> Kind:
    """Say how the operator overload *func* is replayed."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or name in REINTERPRETING:
        return Kind.OPAQUE
    if func.is_view or name in VIEWS:
        return Kind.VIEW
    if name in EMPTIES:
        return Kind.EMPTY
    if schema.is_mutable:
        if not _changes_first_argument_alone(schema):
            return Kind.OPAQUE
        if name in FILLS:
            return Kind.FILL
        return Kind.IN_PLACE if torch.Tag.pointwise in func.tags else Kind.OPAQUE
    if name in PRODUCTS:
        return Kind.PRODUCT
    if name in CHEAP or torch.Tag.pointwise in func.tags:
        return Kind.CHEAP
    return Kind.OPAQUE


def generator_for(device: torch.device, given: Any) -> torch.Generator | None:
    """Return the generator that an operation on *device* draws from; None if there is no telling.

    Args:
        device: of the operation's tensors.
        given: the operation's own ``generator`` argument, if it has one.
    """
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: Any = getattr(module, "default_generators", None)
    current: Callable[[], int] | None = getattr(module, "current_device", None)
    if not generators or current is None:
        return None
    generator: torch.Generator = generators[current() if device.index is None else device.index]
    return generator


def _position_of(name: str, schema: Any) -> int | None:
    names = [argument.name for argument in schema.arguments]
    return names.index(name) if name in names else None


def _takes_tensor(schema: Any) -> bool:
    return bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"


def unannotated_writes(func: Any) -> slice:
    """Return the positions of arguments that *func* changes though its schema does not say so.

    These are batch norm's running mean and variance, and what a collective of
    ``torch.distributed`` writes (``c10d::allreduce_``): its first argument.
    """
    schema = func._schema
    if schema.is_mutable:
        return NOTHING
    if func.namespace == "c10d":
        return slice(0, 1) if schema.name.endswith("_") else NOTHING
    position = _position_of("running_mean", schema)
    return NOTHING if position is None else slice(position, position + 2)


def _changes_first_argument_alone(schema: Any) -> bool:
    changed = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (
        changed == schema.arguments[:1]
        and str(changed[0].type) == "Tensor"
        and len(schema.returns) == 1
    )
