"""What collectives of FSDP2 and DeepSpeed's ZeRO take, while micro-batches are measured.

A unit of FSDP2 calls objects for its collectives, which its methods ``set_custom_all_gather`` and
``set_custom_reduce_scatter`` exchange (``torch/distributed/fsdp/_fully_shard/_fsdp_api.py``). While
micro-batches are measured, each is called between two marks on the stream that the unit runs it on.
Nothing else changes: the same object runs the same collective. ZeRO's are in
:mod:`hf_pyao.auto.zero_times`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.auto.zero_times import ZeroTimes
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.training_engines import FSDP2

_PLACES = ("_all_gather_comm", "_reduce_scatter_comm")


class CollectiveTimes:
    """Times the collectives of a model that FSDP2 or ZeRO shards.

    Args:
        transport: whose marks and times are used.
        device: where the model computes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._exchanged: list[tuple[Any, str, Any]] = []
        self._spans: list[tuple[tuple[str, int], list[Any]]] = []
        """Kind and received bytes of each collective, as they were queued, and marks before and
        after it; there is none after it as long as it runs."""
        self._zero = ZeroTimes(transport, device, self._spans)

    def start(self, model: nn.Module) -> None:
        """Time those of *model*; does nothing without FSDP2 or ZeRO, or where it has begun."""
        if self._exchanged:
            return
        self._zero.start(model)
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
        self._zero.stop()

    def call(self, collective: Any, kind: str, output: Tensor, given: Tensor, **how: Any) -> Any:
        """Run a collective between two marks."""
        before = self._transport.mark(self._device)
        result = collective(output, given, **how)
        if result is None:  # else it may still run, and marks say nothing
            nbytes = abs(output.nbytes - given.nbytes)
            self._spans.append(((kind, nbytes), [before, self._transport.mark(self._device)]))
        return result

    def waits(self) -> Sequence[tuple[Any, float]]:
        """Return where compute waited for ZeRO's collectives: a mark before, and how long, in ms.

        A wait is the time in which a collective ran: what the host takes to queue it is none. Waits
        for the last mark.
        """
        if not self._zero.waits:
            return ()
        first = self._zero.waits[0][0]

        def at_ms(mark: Any) -> float:
            if isinstance(mark, torch.Event):
                mark.synchronize()
            return self._transport.elapsed_ms(first, mark)

        busy: list[tuple[float, float]] = []  # without overlaps, in order
        ran = [tuple(map(at_ms, marks)) for _, marks in self._spans if len(marks) > 1]
        for start_ms, end_ms in sorted(ran):
            start_ms = max(start_ms, busy[-1][1] if busy else start_ms)
            if end_ms > start_ms:
                busy.append((start_ms, end_ms))
        ends_ms = [end_ms for _, end_ms in busy]
        found = []
        for before, after in self._zero.waits:
            from_ms, to_ms, waited_ms = at_ms(before), at_ms(after), 0.0
            for start_ms, end_ms in busy[bisect_right(ends_ms, from_ms) :]:
                if start_ms >= to_ms:
                    break
                waited_ms += min(to_ms, end_ms) - max(from_ms, start_ms)
            found.append((before, waited_ms))
        return found

    def gib_per_s(self) -> float | None:
        """Return received bytes over time; None if nothing was seen. Waits for the last mark.

        Of collectives of one kind and size the time in the middle counts: first ones set up
        connections, and some wait for a rank that is late. One that is queued while another runs
        begins when that has ended.
        """
        times_ms: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        last = None
        for key, (before, *ends) in self._spans:
            for after in ends:
                if isinstance(after, torch.Event):
                    after.synchronize()
                elapsed_ms = self._transport.elapsed_ms(before, after)
                if last is not None:
                    elapsed_ms -= max(0.0, self._transport.elapsed_ms(before, last))
                times_ms[key].append(max(0.0, elapsed_ms))
                last = after
        received = sum(nbytes * len(found) for (_, nbytes), found in times_ms.items())
        taken_ms = sum(median(found) * len(found) for found in times_ms.values())
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
