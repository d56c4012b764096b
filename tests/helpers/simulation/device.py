"""A simulated device: charges each operation to a virtual clock, and counts every live byte.

With :class:`~tests.helpers.simulation.transport.SimulatedTransport` it answers, on any machine and
exactly repeatably, how long a training step would take on given hardware and what its memory peak
would be, whatever of that is hf_pyao's doing and whatever is the model's.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.engine.stores import Store
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.engine.transfer.tiers import Tiers
from hf_pyao.plan.hardware.operation_costs import cost_of
from hf_pyao.plan.hardware.speeds import DeviceModel
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from tests.helpers.simulation.virtual_link import VirtualLink


class SimulatedDevice(NotingMode):  # type: ignore[no-untyped-call]
    """While active, charges operations to a clock and their results to a ledger.

    Args:
        model: the device's speeds.
        link: the clock; a SimulatedTransport's ``link``.
        host_pool: where offloaded bytes are kept, which are not the device's.
        fake_mode: the mode that the operations run in, if they are on fake tensors.

    Use it around whole training steps::

        transport = SimulatedTransport(link=LinkModel(d2h_gib_per_s=25, h2d_gib_per_s=25))
        offloader = attach(model, config, transport=transport)
        with SimulatedDevice(DeviceModel(tflop_per_s=50, memory_gib_per_s=470), transport.link,
                             offloader.link.tiers) as device:
            model(**batch).loss.backward()
        device.link.finish(), device.ledger.peak_bytes
    """

    only_watches = True
    """Read by the engine, which has no second run under a mode that may change operations."""

    def __init__(
        self,
        model: DeviceModel,
        link: VirtualLink,
        host_pool: Store | Tiers | None = None,
        fake_mode: FakeTensorMode | None = None,
    ) -> None:
        super().__init__(MemoryLedger(None if host_pool is None else host_pool.owns), fake_mode)
        self.model = model
        self.link = link

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; charge it unless it only makes a view or an empty tensor."""
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        cost = cost_of(func, args, kwargs, result, inputs, outputs)
        if cost is not None:
            self.link.advance(self.model.op_ms(cost.flops, cost.nbytes))
        return result
