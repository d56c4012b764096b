"""The peak of a step that the real engine takes on fake tensors, counted storage by storage."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pyao.attachment import attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConfigError
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.tools.estimate.fake_step import FakeTraining
from tests.helpers.simulation.late_transport import LateTransport

UNLIMITED_HOST_GIB = 2.0**20


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes on the device over one step: forward, loss and backward."""

    peak_bytes: int
    """Most bytes alive at once, weights and training state included."""
    phase_peak_bytes: dict[str, int]
    """The same for each part of the step."""
    weights_bytes: int
    state_bytes: int
    """Moments of AdamW on the device."""
    offloaded_bytes: int
    num_chunks: int
    """Chunks of the head loss; 0 for the model's own."""


def peak_of(
    training: FakeTraining,
    settings: PyAOConfig,
    micro_batch: int,
    sequence_length: int,
) -> StepPeak:
    """Run one step and return what would be alive on the device.

    Args:
        training: the model, and how it is trained.
        settings: what is offloaded.
        micro_batch: samples.
        sequence_length: tokens of each.
    """
    with training.model() as (model, fake_mode):
        weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        state_bytes = training.state_bytes(model)
        training.let_gradients_go(model)
        with attach(model, settings, transport=LateTransport()) as offloader:
            ledger = MemoryLedger(offloader.link.tiers.owns)
            ledger.note([*model.parameters(), *model.buffers()])
            stack = find_layers(model).stack
            stack.register_forward_hook(lambda *_: ledger.end_phase("layers, forward"))
            with NotingMode(ledger, fake_mode, training.kernels):
                training.run(model, micro_batch, sequence_length, ledger.end_phase)
            figures = offloader.metrics()
            num_chunks = check_head_loss(offloader)
    phases = {name: value + state_bytes for name, value in ledger.phase_peak_bytes.items()}
    return StepPeak(
        peak_bytes=max(phases.values()),
        phase_peak_bytes=phases,
        weights_bytes=weights_bytes,
        state_bytes=state_bytes,
        offloaded_bytes=int(figures["offloaded_bytes"]),
        num_chunks=num_chunks,
    )


def check_head_loss(offloader: Offloader) -> int:
    """Return the number of chunks that the head loss took; 0 if the model's own ran.

    Raises:
        ConfigError: a chunked loss was asked for, and the model kept its own.
    """
    head_loss = offloader.head_loss
    num_chunks = 0 if head_loss is None else int(head_loss.metrics()["head_loss_num_chunks"])
    if offloader.config.effective().head_loss == "chunked" and not num_chunks:
        raise ConfigError(
            f"the model kept its own loss: {offloader.describe()}", key="head-loss-left"
        )
    return num_chunks
