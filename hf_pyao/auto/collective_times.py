"""What collectives of FSDP2 take, while micro-batches are measured.

A unit of FSDP2 calls objects for its collectives, which its methods ``set_custom_all_gather`` and
``set_custom_reduce_scatter`` exchange (``torch/distributed/fsdp/_fully_shard/_fsdp_api.py``). While
micro-batches are measured, each is called between two marks on the stream that the unit runs it on.
Nothing else changes: the same object runs the same collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.training_engines import FSDP2

_PLACES = ("_all_gather_comm", "_reduce_scatter_comm")


class CollectiveTimes:
    """Times the collectives of a model's units of FSDP2.

    Args:
        transport: whose marks and times are used.
        device: where the model computes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._exchanged: list[tuple[Any, str, Any]] = []
        self._spans: defaultdict[tuple[str, int], list[tuple[Any, Any]]] = defaultdict(list)
        """By kind and received bytes of a collective: marks before and after each."""

    def start(self, model: nn.Module) -> None:
        """Time those of *model*; does nothing without FSDP2, or where it has begun."""
        if self._exchanged:
            return
        for group in _groups_of(model):
            for place in _PLACES:
                own = getattr(group, place, None)
                if own is not None:
                    setattr(group, place, _TimedCollective(own, place, self))
                    self._exchanged.append((group, place, own))

    def stop(self) -> None:
        """Take everything off. Twice is fine."""
        for group, place, own in self._exchanged:
            if isinstance(getattr(group, place), _TimedCollective):
                setattr(group, place, own)
        self._exchanged.clear()

    def call(self, collective: Any, kind: str, output: Tensor, given: Tensor, **how: Any) -> Any:
        """Run a collective between two marks."""
        before = self._transport.mark(self._device)
        result = collective(output, given, **how)
        if result is None:  # else it may still run, and marks say nothing
            nbytes = abs(output.nbytes - given.nbytes)
            self._spans[kind, nbytes].append((before, self._transport.mark(self._device)))
        return result

    def gib_per_s(self) -> float | None:
        """Return received bytes over time; None if nothing was seen. Waits for the last mark.

        Of collectives of one kind and size the time in the middle counts: first ones set up
        connections, and some wait for a rank that is late.
        """
        received, taken_ms = 0, 0.0
        for (_, nbytes), spans in self._spans.items():
            times_ms = []
            for before, after in spans:
                if isinstance(after, torch.Event):
                    after.synchronize()
                times_ms.append(self._transport.elapsed_ms(before, after))
            received += nbytes * len(times_ms)
            taken_ms += median(times_ms) * len(times_ms)
        return received / GIB / taken_ms * 1e3 if received and taken_ms > 0 else None


class _TimedCollective:
    """Stands in a unit for what runs its all-gathers or its reduce-scatters."""

    def __init__(self, own: Any, kind: str, times: CollectiveTimes) -> None:
        self._own = own
        self._kind = kind
        self._times = times

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate as the unit's own does."""
        allocated: Tensor = self._own.allocate(*args, **kwargs)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        """Run it, timed."""
        return self._times.call(self._own, self._kind, output_tensor, input_tensor, **how)


def _groups_of(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of the units in *model*."""
    known: set[int] = set()
    for module in model.modules():
        if not FSDP2.wraps(module):
            continue
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None and id(group) not in known:
                known.add(id(group))
                yield group
