"""One step on fake tensors and a virtual clock: the judge of what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.attachment import attach
from hf_pyao.config import PyAOConfig
from hf_pyao.plan.hardware.host_model import FAR_AHEAD, HostModel
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.tools.estimate.fake_step import FakeTraining
from tests.helpers.simulation.clocked_transport import ClockedTransport
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.fake_peak import check_head_loss


@dataclass(frozen=True)
class SimulatedStep:
    """What a step came to on a device that is not there."""

    step_ms: float
    """Until compute was done."""
    stall_ms: float
    """How long compute waited for copies in all."""
    peak_bytes: int
    offloaded_bytes: int


def simulate_step(
    training: FakeTraining,
    settings: PyAOConfig,
    hardware: Hardware,
    micro_batch: int,
    sequence_length: int,
    host: HostModel = FAR_AHEAD,
) -> SimulatedStep:
    """Run the real engine through a step of the whole model, on *hardware*'s clock.

    Args:
        training: the model, and how it is trained.
        settings: what is offloaded.
        hardware: speeds of device and link.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        host: how far the host runs ahead of the device.
    """
    transport = ClockedTransport(hardware.link, host=host)
    with training.model() as (model, fake_mode):
        state_bytes = training.state_bytes(model)
        training.let_gradients_go(model)
        with attach(model, settings, transport=transport) as offloader:
            device = SimulatedDevice(
                hardware.device, transport.link, offloader.link.tiers, fake_mode
            )
            device.ledger.note([*model.parameters(), *model.buffers()])
            with device:
                training.run(model, micro_batch, sequence_length)
            check_head_loss(offloader)
            figures = offloader.metrics()
    return SimulatedStep(
        transport.link.compute_ms,
        transport.link.stall_ms,
        device.ledger.peak_bytes + state_bytes,
        int(figures.get("offloaded_bytes", 0)),
    )
