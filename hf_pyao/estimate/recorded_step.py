"""Records a step on fake tensors as a program of plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from hf_pyao.config import PyAOConfig
from hf_pyao.estimate.fake_step import UNLIMITED_HOST_GIB, FakeTraining, check_head_loss
from hf_pyao.estimate.shrunk_model import remove_equal_layers
from hf_pyao.integrations.attach import attach
from hf_pyao.losses.chunking import ChunkPlan
from hf_pyao.planning.step_program import StepProgram
from hf_pyao.planning.step_recorder import (
    RECORDING,
    RecordingMode,
    RecordingTransport,
    StepRecorder,
)
from hf_pyao.planning.stretch import stretch

NUM_SHOWN_CHUNKS = 3
"""Chunks of the head loss that are run; more are equal to the second."""


def record_step(
    training: FakeTraining,
    micro_batch: int,
    sequence_length: int,
    *,
    head_loss: str = "off",
    recompute_modules: Sequence[str] = (),
    keep_last_layers: int = 0,
    is_whole: bool = False,
) -> StepProgram:
    """Run one step and return it as a program.

    Args:
        training: the model, and how it is trained.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        head_loss: ``PyAOConfig.head_loss``.
        recompute_modules: ``PyAOConfig.recompute_modules``.
        keep_last_layers: last layers in which nothing is recomputed; a plan says which of the
            others are kept. With more than one, all layers are run.
        is_whole: run all layers, also where some stand for others.

    Raises:
        ConfigError: a chunked loss was asked for, and the model keeps its own.
    """
    settings = PyAOConfig.from_dict(
        {
            **RECORDING,
            "head_loss": head_loss,
            "recompute_modules": tuple(recompute_modules),
            "keep_last_layers": keep_last_layers,
            "host_memory_gib": UNLIMITED_HOST_GIB,
        }
    )
    with training.model() as (model, fake_mode):
        state_bytes = training.state_bytes(model)
        # Of the layers that stand for others, the one behind them runs the same.
        runs_all = is_whole or (bool(recompute_modules) and keep_last_layers > 1)
        removed = None if runs_all else remove_equal_layers(model)
        training.let_gradients_go(model)
        recorder = StepRecorder(fake_mode)
        with attach(model, settings, transport=RecordingTransport(recorder)) as offloader:
            recorder.begin(offloader.layer_names, offloader.host_pool.owns)
            offloader.engine.observe(recorder.observer)
            resident_bytes = recorder.note_resident([*model.parameters(), *model.buffers()])
            with RecordingMode(recorder), _few_chunks(recorder):
                training.run(model, micro_batch, sequence_length, label=recorder.label)
            check_head_loss(offloader)
        program = recorder.program(resident_bytes + state_bytes)
    return program if removed is None else stretch(program, removed.layer_names, removed.nbytes)


@contextmanager
def _few_chunks(recorder: StepRecorder) -> Iterator[None]:
    """Let the head loss show three of its chunks: the second stands for all but first and last."""
    all_slices = ChunkPlan.slices

    def few_slices(plan: ChunkPlan) -> Iterator[tuple[int, int]]:
        slices = list(all_slices(plan))
        if len(slices) <= NUM_SHOWN_CHUNKS:
            yield from slices
            return
        yield slices[0]
        recorder.num_runs = len(slices) - 2
        yield slices[1]
        recorder.num_runs = 1
        yield slices[-1]

    with mock.patch.object(ChunkPlan, "slices", few_slices):
        yield
