"""Records a step on fake tensors as a program of plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.errors import ConfigError
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining, runs_without_values


@dataclass(frozen=True)
class _StepOf:
    """A step of a training at one size."""

    training: FakeTraining
    micro_batch: int
    sequence_length: int

    @property
    def kernels(self) -> KernelSettings:
        return self.training.kernels

    @property
    def device(self) -> None:
        return None

    def model(self) -> AbstractContextManager[tuple[nn.Module, FakeTensorMode]]:
        return self.training.model()

    def let_gradients_go(self, model: nn.Module) -> None:
        self.training.let_gradients_go(model)

    def state_bytes(self, model: nn.Module) -> int:
        return self.training.state_bytes(model)

    def run(
        self, model: nn.Module, label: Callable[[Tensor, str], None], exchanged: Exchanged
    ) -> None:
        self.training.run(model, self.micro_batch, self.sequence_length, label=label)


def recorded_step(
    training: FakeTraining,
    micro_batch: int,
    sequence_length: int,
    *,
    levers: Levers = NO_LEVERS,
    recompute_modules: Sequence[str] = (),
    plan: Plan | None = None,
    keep_last_layers: int = 0,
    is_whole: bool = False,
    is_other: bool = False,
) -> RecordedStep:
    """Run one step and return it with as few layers as will do.

    Args:
        training: the model, and how it is trained.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        levers: what changes the step itself.
        recompute_modules: ``PyAOConfig.recompute_modules``.
        plan: what is recomputed beside.
        keep_last_layers: last layers in which nothing is recomputed; a plan says which of the
            others are kept. With more than one, all layers are run.
        is_whole: run all layers, also where some stand for others.
        is_other: as for :func:`~hf_pyao.auto.recording.step_recording.record_fake_step`.

    Raises:
        ConfigError: a chunked loss was asked for, and the model keeps its own.
        LeversRefusedError: a layer does not take part that has to.
    """
    kept = training.kept
    recorded, num_chunks = record_fake_step(
        _StepOf(training, micro_batch, sequence_length),
        levers=levers,
        recompute_modules=recompute_modules,
        plan=plan,
        keep_last_layers=keep_last_layers,
        is_whole=is_whole,
        is_other=is_other,
        equal_layers=None if kept is None else kept.equal_layers,
    )
    if levers.head_loss == "chunked" and not num_chunks:
        raise ConfigError(
            "the model kept its own loss where a chunked one was asked for.", key="head-loss-left"
        )
    return recorded


def record_step(
    training: FakeTraining, micro_batch: int, sequence_length: int, **options: Any
) -> StepProgram:
    """Run one step and return it as a program, with all layers, and what the optimizer allocates.

    Args:
        training: the model, and how it is trained.
        micro_batch: samples.
        sequence_length: tokens of each, without padding.
        options: further arguments of :func:`recorded_step`.

    Raises:
        ConfigError: as :func:`recorded_step`.
        LeversRefusedError: as :func:`recorded_step`.
    """
    recorded = recorded_step(training, micro_batch, sequence_length, **options)
    return training.with_optimizer(recorded.whole())


def record_with(
    training: FakeTraining, configured: Levers
) -> Callable[[int, int, Levers], StepProgram]:
    """Return what records the step at a micro-batch and a length, with any levers."""

    def record(micro_batch: int, sequence_length: int, levers: Levers) -> StepProgram:
        is_other = levers != configured
        with nullcontext() if is_other else runs_without_values(training.config.model_type):
            return record_step(
                training, micro_batch, sequence_length, levers=levers, is_other=is_other
            )

    return record
