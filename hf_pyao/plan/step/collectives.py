"""Collectives among the operations of a step: what they exchange, and what waits for them.

FSDP2 runs collectives on streams of their own. Compute waits for an all-gather where it copies the
gathered parameters out of its buffer, and for a reduce-scatter before the next one, whose buffer is
then free (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, ``wait_for_unshard`` and
``post_backward``). At the end of backward it waits for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.step.step_program import Collective, Operation

_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
_REDUCES = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
_SUMS = ("allreduce_", "allreduce_coalesced_")
_NAMES = frozenset({*_GATHERS, *_REDUCES, *_SUMS})

_NAMESPACE = "c10d"


def collective_of(func: Any, args: Sequence[Any]) -> Collective | None:
    """Return what an operation of ``torch.distributed`` exchanges; None for all others.

    Args:
        func: the overload that was called.
        args: its arguments: what it writes and what it reads are first, in this order.
    """
    name = func._overloadpacket.__name__
    if name not in _NAMES or func.namespace != _NAMESPACE:
        return None
    if name in _SUMS:  # a reduce-scatter and an all-gather
        return Collective(2 * _nbytes(args[0]), is_gather=False)
    if name in _GATHERS:
        return Collective(max(0, _nbytes(args[0]) - _nbytes(args[1])), is_gather=True)
    return Collective(max(0, _nbytes(args[1]) - _nbytes(args[0])), is_gather=False)


class CollectiveWaits:
    """Which operation of a step that is recorded waits for which collective."""

    def __init__(self) -> None:
        self._num_queued = 0
        self._gathered: dict[int, tuple[int, StorageWeakRef]] = {}
        """By the storage that an all-gather writes: which of the collectives that was."""
        self._reductions: list[int] = []
        """Which of the collectives are reductions."""

    def before(self, collective: Collective | None, reads: Iterable[torch.Tensor]) -> int:
        """Return which collective an operation waits for, as :attr:`Operation.awaits`.

        Args:
            collective: what it exchanges itself.
            reads: the tensors that it gets.
        """
        if collective is not None:
            return 0 if collective.is_gather else self.before_reduction(1)
        newest = -1
        if self._gathered:
            for tensor in reads:
                found = self._gathered.pop(tensor.untyped_storage()._cdata, None)
                if found is not None and not found[1].expired():  # type: ignore[no-untyped-call]
                    newest = max(newest, found[0])
        return 0 if newest < 0 else self._num_queued - newest

    def before_reduction(self, num_beside: int) -> int:
        """Return which collective a reduction waits for where *num_beside* may run beside compute.

        Where none may, the one before has been waited for.
        """
        if not 0 < num_beside <= len(self._reductions):
            return 0
        return self._num_queued - self._reductions[-num_beside]

    def queued(self, collective: Collective, args: Sequence[Any]) -> None:
        """Note a collective that was queued, called with *args*."""
        self.queued_into(tensors_in((args[0],)) if collective.is_gather else ())

    def queued_into(self, gathered: Iterable[torch.Tensor]) -> None:
        """Note a collective that was queued, and what it gathered: of a reduction, nothing."""
        is_gather = False
        for tensor in gathered:
            is_gather = True
            storage = tensor.untyped_storage()
            self._gathered[storage._cdata] = (self._num_queued, _ref(storage))
        if not is_gather:
            self._reductions.append(self._num_queued)
        self._num_queued += 1


class Exchanged(Protocol):
    """Is told of collectives that no operation of torch runs."""

    def __call__(
        self, collective: Collective, into: torch.Tensor | None = None, *, num_beside: int = 0
    ) -> None:
        """Take note of one that is queued now.

        Args:
            collective: what it exchanges.
            into: what it gathers into; compute waits for it where that is read. None: it reduces.
            num_beside: how many reductions may run beside compute; with 0 it waits for this one.
        """
        ...


def with_collectives(
    times_ms: list[float], operations: Sequence[Operation], gib_per_s: float | None
) -> list[float]:
    """Return *times_ms* with those of collectives, at a speed of the interconnect.

    Args:
        times_ms: what each operation takes.
        operations: of the step.
        gib_per_s: that speed; None: it is not known, and collectives take no time.
    """
    return [
        elapsed_ms
        if operation.collective is None
        else collective_ms(operation.collective, gib_per_s)
        for elapsed_ms, operation in zip(times_ms, operations, strict=True)
    ]


def collective_ms(collective: Collective, gib_per_s: float | None) -> float:
    """Return how long a collective takes; 0 where no speed is known."""
    return 0.0 if gib_per_s is None else collective.nbytes / GIB / gib_per_s * 1e3


def without_collectives(
    times_ms: Sequence[float], operations: Sequence[Operation]
) -> Sequence[float]:
    """Return *times_ms* of compute alone: collectives take none of it."""
    if not any(operation.collective for operation in operations):
        return times_ms
    return [
        elapsed_ms if operation.collective is None else 0.0
        for elapsed_ms, operation in zip(times_ms, operations, strict=True)
    ]


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in((tensors,)))


def _ref(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
