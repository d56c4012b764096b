"""Bytes of blocks by the settings of zeroth order, and embeddings and head that visit by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_pyao.engine.weights.host_bytes import aligned
from hf_pyao.engine.zeroth_order.int8_transfer import packed_nbytes, packs
from hf_pyao.engine.zeroth_order.perturbation import CHUNK_ELEMENTS
from hf_pyao.plan.step.ledger import MemoryLedger

STATE_BYTES = 4
"""Of an element's momentum."""


@dataclass(frozen=True)
class BlockSize:
    """Bytes of one layer."""

    slot_bytes: int
    """In a slot: weights, with their momentum or with their noise."""
    host_bytes: int

    @classmethod
    def of(cls, layer: nn.Module, momentum: float, transfer_dtype: str | None) -> BlockSize:
        """Return the bytes of *layer*, all of which is trained."""
        parameters = list(layer.parameters())
        stored = sum(aligned(p.nbytes) for p in parameters)
        state = sum(aligned(STATE_BYTES * p.numel()) for p in parameters) * bool(momentum)
        if transfer_dtype is None:
            return cls(stored + state, stored + state)
        packed = sum(
            aligned(packed_nbytes(p.size()) if packs(p.size(), p.dtype) else p.nbytes)
            for p in parameters
        )
        return cls(2 * packed, stored + state + packed)


class Ends:
    """Embeddings and head of a model on fake tensors, where these visit by rows.

    Args:
        model: with fake weights.
        layers: name and module of each layer; None: embeddings and head stay on the device.
        piece_bytes: most bytes of a piece of rows.
        noise_bytes: what drawing a chunk of noise takes.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]] | None,
        piece_bytes: int,
        noise_bytes: int,
    ) -> None:
        self._modules = [] if layers is None else _modules_of_ends(model, layers)
        self._weights: dict[int, Any] = {id(m.weight): m.weight for m in self._modules}
        self.ids = set(self._weights)
        """Of the parameters that visit by rows."""
        self._kept: dict[int, torch.Tensor] = {}
        """By weight, rows that were looked up, for the other pass."""
        self._piece_bytes = piece_bytes
        self._noise_bytes = noise_bytes

    def host_bytes(self, has_momentum: bool) -> int:
        """Return the bytes on the host."""
        state = STATE_BYTES * has_momentum
        return sum(p.nbytes + state * p.numel() for p in self._weights.values())

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weight, if it visits."""
        return sum(m.weight.nbytes for m in self._modules if isinstance(m, nn.Linear))

    def by_rows(self, ledger: MemoryLedger) -> TorchFunctionMode:
        """Return a mode in which look-ups and products allocate what they do by rows."""
        return _ByRows(self, ledger)

    def look_up(
        self, ids: torch.Tensor, weight: torch.Tensor, ledger: MemoryLedger
    ) -> torch.Tensor:
        """Allocate what a look-up does, with all ids distinct."""
        rows = torch.empty(ids.numel(), weight.shape[1], dtype=weight.dtype)
        z = torch.empty(rows.shape, dtype=torch.float32)
        ledger.note((z,), self._drawing(rows))
        self._kept[id(weight)] = rows
        return (rows.float() + z).to(rows.dtype).view(*ids.shape, -1)

    def product(
        self, values: torch.Tensor, weight: torch.Tensor, ledger: MemoryLedger
    ) -> torch.Tensor:
        """Allocate what a product by pieces does."""
        num_rows, width = weight.shape
        most = max(1, self._piece_bytes // (width * weight.itemsize))
        result = torch.empty(*values.shape[:-1], num_rows, dtype=weight.dtype)
        for first in range(0, num_rows, most):
            end = min(first + most, num_rows)
            piece = torch.empty(end - first, width, dtype=weight.dtype)
            ledger.note((piece,), self._drawing(piece))
            result[..., first:end] = values @ piece.t()
            del piece
        return result

    def _drawing(self, like: torch.Tensor) -> int:
        return int(min(1.0, like.numel() / CHUNK_ELEMENTS) * self._noise_bytes)


class _ByRows(TorchFunctionMode):
    """Computes with weights of embeddings and head as zeroth order does."""

    def __init__(self, ends: Ends, ledger: MemoryLedger) -> None:
        super().__init__()
        self._ends = ends
        self._ledger = ledger

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        weight: Any = args[1] if len(args) > 1 else None
        if id(weight) in self._ends.ids and function in (F.embedding, F.linear):
            if function is F.embedding:
                return self._ends.look_up(args[0], weight, self._ledger)
            return self._ends.product(args[0], weight, self._ledger)
        return function(*args, **(kwargs or {}))


def _modules_of_ends(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Return embeddings outside of layers, and the head; fake weights have no storage to tell."""
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    found = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    return [*found, head] if isinstance(head, nn.Linear) else list(found)
