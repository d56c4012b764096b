"""Reading the arguments of indexing, reshaping and casting, for logits that are put off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_number(value: object) -> bool:
    """Whether *value* is a plain number (no tensor, whose value may be on the device)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def only_dtype(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> torch.dtype | None:
    """Return the dtype that ``tensor.to(*args, **kwargs)`` changes to, if it changes nothing else.

    None for arguments that move to another device, copy, or are not understood.
    """
    named = dict(kwargs)
    asked = [*args, *(named.pop(key) for key in ("dtype", "device") if key in named)]
    named.pop("non_blocking", None)
    dtypes = [item for item in asked if isinstance(item, torch.dtype) and item.is_floating_point]
    places = [item for item in asked if isinstance(item, torch.device | str)]
    same_place = all(torch.device(place) == device for place in places)
    if named or not same_place or len(dtypes) != 1 or len(dtypes) + len(places) != len(asked):
        return None
    return dtypes[0]


def sizes_of(shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the sizes in ``view(*shape)``, given one by one or as a sequence; None if neither."""
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    return shape


def split_index(index: Any, num_dims: int) -> tuple[tuple[Any, ...], int | None] | None:
    """Split ``logits[index]`` into an index of the tokens and a cut of the vocabulary.

    Returns:
        ``(tokens, stop)``: index the hidden states with *tokens* and keep the first *stop* columns
        of the vocabulary (None: all). None if *index* does anything else.
    """
    parts = index if isinstance(index, tuple) else (index,)
    num_indexed, num_ellipses = 0, 0
    for part in parts:
        if part is Ellipsis:
            num_ellipses += 1
        elif isinstance(part, Tensor) and part.dtype == torch.bool:
            num_indexed += part.dim()
        elif isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool)):
            num_indexed += 1
        else:
            return None
    if num_ellipses > 1 or num_indexed > num_dims or not parts:
        return None
    last = parts[-1]
    if num_indexed < num_dims and (num_ellipses == 0 or last is Ellipsis):
        return parts, None
    starts_at_zero = isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
    if not starts_at_zero or not (last.stop is None or isinstance(last.stop, int)):
        return None
    return (*parts[:-1], slice(None)), last.stop
