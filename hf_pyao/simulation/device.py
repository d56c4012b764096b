"""A simulated device: charges each operation to a virtual clock, and counts every live byte.

With :class:`~hf_pyao.simulation.transport.SimulatedTransport` it answers, on any machine and
exactly repeatably, how long a training step would take on given hardware and what its memory peak
would be, whatever of that is hf_pyao's doing and whatever is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_pyao.errors import ConfigError
from hf_pyao.runtime.layer_inputs import tensors_in
from hf_pyao.simulation.ledger import MemoryLedger
from hf_pyao.simulation.link_model import VirtualLink
from hf_pyao.stores import HostPool


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Speeds of a device. An operation takes the longer of arithmetic and memory traffic."""

    tflop_per_s: float
    memory_gib_per_s: float
    launch_us: float = 3.0
    """Fixed cost of each operation."""

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ConfigError: a speed is not positive.
        """
        for name in ("tflop_per_s", "memory_gib_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive speed.")

    def op_ms(self, flops: float, nbytes: float) -> float:
        """Return how long an operation takes."""
        compute_ms = flops / (self.tflop_per_s * 1e9)
        memory_ms = nbytes / 2**30 / self.memory_gib_per_s * 1e3
        return max(compute_ms, memory_ms) + self.launch_us / 1e3


class SimulatedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, charges operations to a clock and their results to a ledger.

    Args:
        model: the device's speeds.
        link: the clock; a SimulatedTransport's ``link``.
        host_pool: host memory, whose bytes are not the device's.

    Use it around whole training steps::

        transport = SimulatedTransport(link=LinkModel(d2h_gib_per_s=25, h2d_gib_per_s=25))
        offloader = attach(model, config, transport=transport)
        with SimulatedDevice(DeviceModel(tflop_per_s=50, memory_gib_per_s=470), transport.link,
                             offloader.host_pool) as device:
            model(**batch).loss.backward()
        device.link.finish(), device.ledger.peak_bytes
    """

    def __init__(
        self,
        model: DeviceModel,
        link: VirtualLink,
        host_pool: HostPool | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.link = link
        self.ledger = MemoryLedger(None if host_pool is None else host_pool.owns)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; charge it unless it only makes a view or an empty tensor."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        self.ledger.note(outputs)
        if not func.is_view and func._overloadpacket not in _FREE:
            inputs = list(tensors_in((args, kwargs)))
            nbytes = sum(t.numel() * t.element_size() for t in inputs + outputs)
            self.link.advance(self.model.op_ms(_flops(func, args, kwargs, result), nbytes))
        return result


_FREE = frozenset(
    {
        torch.ops.aten.detach,
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.set_,
        torch.ops.aten._unsafe_view,
    }
)
"""Operations that run no kernel."""


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
