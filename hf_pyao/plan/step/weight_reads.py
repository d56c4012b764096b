"""Which frozen weights may be streamed, and which of them an operation reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from hf_pyao.engine.transfer.graph_task import is_in_backward
from hf_pyao.plan.step.step_program import WeightRead


class Streamable(NamedTuple):
    """A tensor that may be streamed; fields as of :class:`~.step_program.Resident`."""

    experts: int = 0
    num_experts: int = 0
    end: int = 0


StreamableTensors = Mapping[int, Streamable]
"""By ``id`` of the tensor."""


class _Known(NamedTuple):
    layer: int
    experts: int
    num_experts: int
    nbytes: int


class WeightReads:
    """Recognises streamable weights by their storage, in layers with fused experts."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._mixtures: set[int] = set()

    def note(self, storage: torch.UntypedStorage, layer: int, streamable: Streamable) -> None:
        """Note that *storage* holds a streamable weight of *layer*."""
        self._known[storage._cdata] = _Known(
            layer, streamable.experts, streamable.num_experts, storage.nbytes()
        )
        if streamable.experts:
            self._mixtures.add(layer)

    def of(self, tensors: Iterable[torch.Tensor]) -> WeightRead | None:
        """Return what an operation with these arguments reads; None outside of mixtures."""
        if not self._mixtures:
            return None
        found: WeightRead | None = None
        for tensor in tensors:
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is None or known.layer not in self._mixtures:
                continue
            is_backward = is_in_backward() and not torch.is_grad_enabled()
            if not known.experts:
                found = found or WeightRead(0, is_backward=is_backward)
                continue
            expert_bytes = known.nbytes // known.num_experts
            first = int(tensor.storage_offset()) * tensor.itemsize // expert_bytes
            number = max(1, tensor.numel() * tensor.itemsize // expert_bytes)
            return WeightRead(known.experts, first, first + number, is_backward)
        return found
