"""What collectives of FSDP2 and DeepSpeed's ZeRO take, and what compute waits for those of ZeRO.

A unit of FSDP2 calls objects for its collectives, which its methods ``set_custom_all_gather`` and
``set_custom_reduce_scatter`` exchange (``torch/distributed/fsdp/_fully_shard/_fsdp_api.py``). All
collectives of DeepSpeed go through one object, ``deepspeed.comm.comm.cdb``. While micro-batches are
measured, they are called between two marks. A collective that is not waited for where it is queued
has its second mark where its future is done: torch calls that on a stream that has waited for it,
or on a thread of gloo. Under ZeRO-3 compute waits for gathered parameters in the coordinator's
``fetch_sub_module``, which is called between two marks too. Nothing else changes.

Source: deepspeedai/DeepSpeed 0.19, ``deepspeed/comm/comm.py``, ``deepspeed/comm/torch.py``
(``TorchBackend``), ``deepspeed/runtime/zero/partitioned_param_coordinator.py``.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.auto.recording.sharded_copy import groups_of
from hf_pyao.auto.recording.zero_copy import zero_engine_of
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.transfer.compute_streams import current_stream
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.ranks import process_rank
from hf_pyao.training_engines import FSDP2

_PLACES = ("_all_gather_comm", "_reduce_scatter_comm")
"""Of a unit's parameter group: what runs its collectives."""

_LEAST_BYTES = 512
"""Of less only latency is seen: norms, and flags."""

_SUMS = {"all_reduce": 2, "reduce": 1}
"""How often each byte crosses the interconnect where one tensor is given and received."""
_DIVIDED = ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "reduce_scatter")


class CollectiveTimes:
    """Times the collectives of a model that FSDP2 or ZeRO shards.

    Args:
        transport: whose marks and times are used.
        device: where the model computes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._spans: list[tuple[tuple[str, int], list[Any]]] = []
        """Kind and received bytes of each collective, as they were queued, and marks before and
        after it; there is none after it as long as it runs."""
        self._waits: list[tuple[Any, Any]] = []
        """Marks on the stream that computes, around each wait."""
        self._put_back: list[Callable[[], None]] = []
        self._compute: Any = None
        self._has_begun = False

    def start(self, model: nn.Module) -> None:
        """Time those of *model*; does nothing without FSDP2 or ZeRO, or where it has begun."""
        if self._has_begun:
            return
        self._has_begun = True
        units = [module for module in model.modules() if FSDP2.wraps(module)]
        states = dict.fromkeys(module._get_fsdp_state() for module in units)  # type: ignore[operator]
        for group in (group for state in states for group in groups_of(state)):
            for place in _PLACES:
                own = getattr(group, place, None)
                if own is not None:
                    run = partial(self._collective, place, own)
                    self._exchange(group, place, _TimedCollective(own, run))
        engine = zero_engine_of(model)
        if engine is None:
            return
        self._compute = None if self._device.type == "cpu" else current_stream(self._device)
        backend = sys.modules["deepspeed.comm.comm"].cdb
        for name in (*_SUMS, *_DIVIDED):
            own = getattr(backend, name, None)
            if own is not None:
                self._exchange(backend, name, partial(self._collective, name, own))
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        coordinator = getattr(offload, "param_coordinator", None)
        if coordinator is not None:
            fetch = partial(self._fetch, coordinator.fetch_sub_module)
            self._exchange(coordinator, "fetch_sub_module", fetch)

    def stop(self) -> None:
        """Take everything off. Twice is fine."""
        while self._put_back:
            self._put_back.pop()()
        self._has_begun = False

    def _exchange(self, place: Any, name: str, timed: Any) -> None:
        """Put *timed* in place of an attribute of an object."""
        before = vars(place).get(name)
        setattr(place, name, timed)

        def put_back() -> None:
            if vars(place).get(name) is not timed:
                return  # others have exchanged it since
            if before is None:
                delattr(place, name)
            else:
                setattr(place, name, before)

        self._put_back.append(put_back)

    def _fetch(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters of a module of ZeRO-3, and wait for them."""
        before = self._transport.mark(self._device)
        result = own(*args, **kwargs)
        self._waits.append((before, self._transport.mark(self._device)))
        return result

    def _collective(self, kind: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a collective between two marks."""
        marks = [self._transport.mark(self._device)]
        work = own(*args, **kwargs)
        nbytes = received_bytes(kind, list(tensors_in((args, kwargs))), kwargs.get("group"))
        if nbytes < _LEAST_BYTES:
            return work
        if work is None:  # compute waits for it, if it is queued there
            marks.append(self._transport.mark(self._device))
            is_waited_for = self._compute is None or self._compute == current_stream(self._device)
            if kind not in _PLACES and is_waited_for:
                self._waits.append((marks[0], marks[1]))
        elif kind in _PLACES:
            return work  # it may still run, and marks say nothing
        elif hasattr(work, "get_future"):
            future = work.get_future()
            future.add_done_callback(lambda _: marks.append(self._transport.mark(self._device)))
        self._spans.append(((kind, nbytes), marks))
        return work

    def waits(self) -> Sequence[tuple[Any, float]]:
        """Return where compute waited for ZeRO's collectives: a mark before, and how long, in ms.

        A wait is the time in which a collective ran: what the host takes to queue it is none. Waits
        for the last mark.
        """
        if not self._waits:
            return ()
        first = self._waits[0][0]

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
        for before, after in self._waits:
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


def received_bytes(kind: str, tensors: Sequence[Tensor], group: Any) -> int:
    """Return what a rank receives for a collective, by a ring.

    Args:
        kind: the method of DeepSpeed's backend, or the place of a unit of FSDP2.
        tensors: what it is called with.
        group: its process group; None: all ranks.
    """
    num_ranks = process_rank().num_ranks if group is None else group.size()
    whole = sum(each.nbytes for each in tensors)
    if kind in _SUMS:
        return _SUMS[kind] * (whole - whole // num_ranks)
    whole = whole * num_ranks // (num_ranks + 1)  # of all ranks' parts, beside one of them
    return whole - whole // num_ranks


class _TimedCollective:
    """Stands in a unit of FSDP2 for what runs its all-gathers or its reduce-scatters."""

    def __init__(self, own: Any, run: Callable[..., Any]) -> None:
        self._own = own
        self._run = run

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate as the unit's own does."""
        allocated: Tensor = self._own.allocate(*args, **kwargs)
        return allocated

    def __call__(self, *args: Any, **how: Any) -> Any:
        """Run it, timed."""
        return self._run(*args, **how)
