"""Records a step on fake tensors as a program of plain numbers."""

from __future__ import annotations

import torch

from hf_pyao.config import PyAOConfig
from hf_pyao.estimate.fake_step import UNLIMITED_HOST_GIB, FakeTraining, check_head_loss
from hf_pyao.integrations.attach import attach
from hf_pyao.planning.step_program import StepProgram
from hf_pyao.planning.step_recorder import (
    RECORDING,
    RecordingMode,
    RecordingTransport,
    StepRecorder,
)


def record_step(
    training: FakeTraining,
    micro_batch: int,
    sequence_length: int,
    *,
    head_loss: str = "off",
) -> StepProgram:
    """Run one step and return it as a program.

    Args:
        training: the model, and how it is trained.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        head_loss: ``PyAOConfig.head_loss``.

    Raises:
        ConfigError: a chunked loss was asked for, and the model keeps its own.
    """
    settings = PyAOConfig.from_dict(
        {**RECORDING, "head_loss": head_loss, "host_memory_gib": UNLIMITED_HOST_GIB}
    )
    with training.model() as (model, fake_mode):
        weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        training.let_gradients_go(model)
        recorder = StepRecorder(fake_mode)
        with attach(model, settings, transport=RecordingTransport(recorder)) as offloader:
            recorder.begin(offloader.layer_names, offloader.host_pool.owns)
            offloader.engine.observe(recorder.observer)
            resident_bytes = recorder.note_resident([*model.parameters(), *model.buffers()])
            with RecordingMode(recorder):
                training.run(model, micro_batch, sequence_length)
            check_head_loss(offloader)
        return recorder.program(resident_bytes + training.state_bytes(weights_bytes))


def weights_of(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters, each storage once."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())
