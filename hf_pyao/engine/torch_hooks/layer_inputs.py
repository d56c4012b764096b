"""What goes into a layer and comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_pyao.engine.transfer.layout import is_plain


def shared_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a layer gets beside its hidden states.

    Masks, rotary tables, encoder states: the same for every layer, so that moving one layer's
    would free nothing. The hidden states are the first positional argument, or go by that name, or
    come first.
    """
    own = args[0] if args else kwargs.get("hidden_states")
    if own is None:
        own = next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
    found: list[torch.Tensor] = []
    for value in (*args[1:], *kwargs.values()):
        if value is own:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict | list | tuple):
            found.extend(tensors_in(value))
    if not isinstance(own, torch.Tensor) or not found or not is_plain(own):
        return found
    storage = own.untyped_storage()._cdata
    return [
        tensor
        for tensor in found
        if is_plain(tensor) and tensor.untyped_storage()._cdata != storage
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings (model outputs included)."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    is_mapping = isinstance(value, dict)
    if not is_mapping and not isinstance(value, list | tuple):
        return
    for item in value.values() if is_mapping else value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple):
            yield from tensors_in(item)
