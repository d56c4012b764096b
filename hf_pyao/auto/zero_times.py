"""What collectives of DeepSpeed's ZeRO take, and what compute waits for them.

All collectives of DeepSpeed go through one object, ``deepspeed.comm.comm.cdb``. While micro-batches
are measured, its methods are called between two marks. A collective that is not waited for where it
is queued has its second mark where its future is done: torch calls that on a stream that has waited
for it, or on a thread of gloo. Under ZeRO-3 compute waits for gathered parameters in the
coordinator's ``fetch_sub_module``, which is called between two marks too. Nothing else changes.

Source: deepspeedai/DeepSpeed 0.19, ``deepspeed/comm/comm.py``, ``deepspeed/comm/torch.py``
(``TorchBackend``), ``deepspeed/runtime/zero/partitioned_param_coordinator.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_pyao.auto.recording.zero_copy import zero_engine_of
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.transfer.compute_streams import current_stream
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.ranks import process_rank

_LEAST_BYTES = 512
"""Of less only latency is seen: norms, and flags."""

_SUMS = {"all_reduce": 2, "reduce": 1}
"""How often each byte crosses the interconnect where one tensor is given and received."""
_DIVIDED = ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "reduce_scatter")


class ZeroTimes:
    """Times the collectives of a model that ZeRO trains.

    Args:
        transport: whose marks and times are used.
        device: where the model computes.
        spans: where kind, received bytes and marks of each collective go.
    """

    def __init__(self, transport: Transport, device: torch.device, spans: list[Any]) -> None:
        self._transport = transport
        self._device = device
        self._spans = spans
        self.waits: list[tuple[Any, Any]] = []
        """Marks on the stream that computes, around each wait."""
        self._put_back: list[Callable[[], None]] = []
        self._compute: Any = None
        self._has_begun = False

    def start(self, model: nn.Module) -> None:
        """Time those of *model*; does nothing without ZeRO, or where it has begun."""
        if self._has_begun:
            return
        self._has_begun = True
        engine = zero_engine_of(model)
        if engine is None:
            return
        self._compute = None if self._device.type == "cpu" else current_stream(self._device)
        backend = sys.modules["deepspeed.comm.comm"].cdb
        for name in (*_SUMS, *_DIVIDED):
            if hasattr(backend, name):
                self._exchange(backend, name, partial(self._collective, name))
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        coordinator = getattr(offload, "param_coordinator", None)
        if coordinator is not None:
            self._exchange(coordinator, "fetch_sub_module", self._fetch)

    def stop(self) -> None:
        """Take everything off. Twice is fine."""
        while self._put_back:
            self._put_back.pop()()
        self._has_begun = False

    def _exchange(self, place: Any, name: str, timed: Callable[..., Any]) -> None:
        """Have *timed* called with the method *name* of an object, and its arguments."""
        call = partial(timed, getattr(place, name))
        before = vars(place).get(name)
        setattr(place, name, call)

        def put_back() -> None:
            if vars(place).get(name) is not call:
                return  # others have exchanged it since
            if before is None:
                delattr(place, name)
            else:
                setattr(place, name, before)

        self._put_back.append(put_back)

    def _fetch(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters of a module, and wait for them."""
        before = self._transport.mark(self._device)
        result = own(*args, **kwargs)
        self.waits.append((before, self._transport.mark(self._device)))
        return result

    def _collective(self, kind: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a collective between two marks."""
        marks = [self._transport.mark(self._device)]
        work = own(*args, **kwargs)
        nbytes = received_bytes(kind, list(tensors_in((args, kwargs))), kwargs.get("group"))
        if nbytes < _LEAST_BYTES:
            return work
        self._spans.append(((kind, nbytes), marks))
        if work is None:  # compute waits for it, if it is queued there
            marks.append(self._transport.mark(self._device))
            if self._compute is None or self._compute == current_stream(self._device):
                self.waits.append((marks[0], marks[1]))
        elif hasattr(work, "get_future"):
            future = work.get_future()
            future.add_done_callback(lambda _: marks.append(self._transport.mark(self._device)))
        return work


def received_bytes(kind: str, tensors: list[Tensor], group: Any) -> int:
    """Return what a rank receives for a collective, by a ring.

    Args:
        kind: the method of DeepSpeed's backend.
        tensors: what it is called with.
        group: its process group; None: all ranks.
    """
    num_ranks = process_rank().num_ranks if group is None else group.size()
    whole = sum(each.nbytes for each in tensors)
    if kind in _SUMS:
        return _SUMS[kind] * (whole - whole // num_ranks)
    whole = whole * num_ranks // (num_ranks + 1)  # of all ranks' parts, beside one of them
    return whole - whole // num_ranks
