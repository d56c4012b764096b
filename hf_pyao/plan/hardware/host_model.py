"""How far the host runs ahead of the device."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from hf_pyao.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """The host that queues kernels.

    CUDA queues kernels asynchronously: the host learns that something is done only once the device
    has come to it, and by then it has queued what follows. The default host takes no time and has
    no limit, so that it queues a whole step before the device begins; what it asks the device then
    is never done yet.
    """

    op_ms: float = 0.0
    """What the host takes to queue one kernel."""
    queue_limit: int | None = None
    """Kernels that may be queued before the host has to wait: about 1,000 on CUDA. None: no limit.
    0: the host waits for each kernel, so that it is in step with the device."""

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            ConfigError: one of them is negative.
        """
        if not 0 <= self.op_ms < math.inf:
            raise ConfigError(
                f"op_ms is {self.op_ms}; expected a time of 0 or more, in ms.", key="wrong-argument"
            )
        if self.queue_limit is not None and self.queue_limit < 0:
            raise ConfigError(
                f"queue_limit is {self.queue_limit}; expected 0 or more kernels, or None.",
                key="wrong-argument",
            )


FAR_AHEAD = HostModel()
"""Queues a whole step before the device begins."""

IN_STEP = HostModel(queue_limit=0)
"""Waits for each kernel."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What the parts of a step take the host: the time of Python, mostly.

    The defaults were fitted by hand to a few steps of OPT-1.3B and Llama-1.2B on an H200. How fast
    a host is says its profile: see ``host_costs_of`` in ``predict/host_times.py``.
    """

    op_ms: float = 0.036
    """An operation of forward, with its share of the modules around it."""
    backward_op_ms: float = 0.022
    """An operation of backward."""
    hooks_ms: float = 0.4
    """The hooks in a layer's forward, where any plan but keeping everything is followed."""
    move_ms: float = 0.095
    """A tensor that moves, each way."""
    trace_ms: float = 0.18
    """More for each operation of a layer that is traced, so that a part of it can run again."""
    replay_ms: float = 0.1
    """An operation that was traced, and runs again."""
    checkpoint_ms: float = 1.4
    """More for a layer that runs again as a whole, in forward, and as much in backward."""
    checkpoints_all: bool = False
    """All layers run again as a whole, and did when the step was recorded."""

    def scaled(self, factor: float) -> HostCosts:
        """Return the costs on a host that takes *factor* times as long."""
        times = {name: value * factor for name, value in vars(self).items() if name[-3:] == "_ms"}
        return replace(self, **times)


class HostClock:
    """Where the host is, on the clock of the device that it queues kernels for.

    Args:
        model: how fast it queues.
    """

    def __init__(self, model: HostModel) -> None:
        self._model = model
        self._host_ms = 0.0
        self._ends_ms: deque[float] = deque(maxlen=model.queue_limit or 1)
        """When the newest kernels end, as many as may be queued."""

    def launch(self, compute_ms: float) -> float:
        """Queue a kernel behind what ends at *compute_ms*; return when it begins, in ms."""
        model, ends_ms = self._model, self._ends_ms
        if model.queue_limit == 0:
            self._host_ms = max(self._host_ms, compute_ms)
        elif model.queue_limit is not None and len(ends_ms) == model.queue_limit:
            self._host_ms = max(self._host_ms, ends_ms[0])
        self._host_ms += model.op_ms
        return max(compute_ms, self._host_ms)

    def ends(self, compute_ms: float) -> None:
        """Note that the kernel that was queued last ends at *compute_ms*."""
        self._ends_ms.append(compute_ms)

    def seen_ms(self, compute_ms: float) -> float:
        """Return up to when the host knows what is done, where compute has got to *compute_ms*."""
        return compute_ms if self._model.queue_limit == 0 else self._host_ms
