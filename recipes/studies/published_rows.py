"""A published figure beside ours, and the steps that ours are taken from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.config import PyAOConfig
from hf_pyao.plan.hardware.speeds import DeviceModel
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, Operation, StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step

SEQUENCE_LENGTH = 512
MODELS = {"opt": "opt:1.3b", "gpt2": "gpt2:0.8b", "llama": "llama:1.2b"}
"""The models of the PyAO paper."""
PLACES = {model: place for place, model in enumerate(MODELS)}
"""Where a model's figure is in the tables that have one for each."""
NAMES = {"opt": "OPT-1.3B", "gpt2": "GPT-2 0.8B", "llama": "Llama 1.2B"}
TRACE = "an independent trace of the same models"
"""Another program of ours, which shares no code with hf_pyao: fake CUDA tensors, its own hooks,
its own ledger and its own arithmetic of time."""


@dataclass(frozen=True)
class Row:
    """One published figure, and ours."""

    figure: str
    """What is compared."""
    unit: str
    published: float
    ours: float
    explanation: str = ""
    """Why ours differs; shown where it is out of tolerance."""
    without: float | None = None
    """Ours with what the explanation names undone: what shows that it is the cause."""
    _: KW_ONLY
    source: str
    """Title and section, or :data:`TRACE`."""
    tolerance: float
    """Largest difference that needs no explanation: a share, or points if the unit is ``"%"``."""

    @property
    def difference(self) -> float:
        """Ours less the published figure: in points if the unit is ``"%"``, else as a share."""
        return self._difference_of(self.ours)

    @property
    def is_within(self) -> bool:
        """Whether ours is within the tolerance."""
        return abs(self.difference) <= self.tolerance

    @property
    def is_shown(self) -> bool:
        """Whether a figure shows that the explanation holds."""
        return self.without is not None and abs(self._difference_of(self.without)) <= self.tolerance

    def _difference_of(self, value: float) -> float:
        return value - self.published if self.unit == "%" else value / self.published - 1


@dataclass(frozen=True, kw_only=True)
class EagerTraining(FakeTraining):
    """The same with attention that keeps its probabilities."""

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model on fake tensors, with eager attention."""
        with super().model() as (model, fake_mode):
            found: Any = model
            found.set_attn_implementation("eager")
            yield model, fake_mode


class Steps:
    """Records each step once."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], StepProgram] = {}
        self._configs: dict[str, Any] = {}

    def config(self, model: str) -> Any:
        """Return the configuration of a model, as ``pyao estimate --model`` has it."""
        if model not in self._configs:
            self._configs[model] = config_of(parse_model(model))
        return self._configs[model]

    def training(self, model: str, **more: Any) -> FakeTraining:
        """Return how *model* is trained: ZeRO-2 with its optimizer on the host."""
        return FakeTraining(config=self.config(model), **more)

    def record(
        self,
        model: str,
        micro_batch: int,
        length: int = SEQUENCE_LENGTH,
        *,
        checkpointing: bool = False,
        is_eager: bool = False,
        variant: str = "",
        **options: Any,
    ) -> StepProgram:
        """Return a step of *model*; *options* are those of ``record_step``.

        *variant* names what else is different about the model while this is called.
        """
        key = (
            model,
            micro_batch,
            length,
            checkpointing,
            is_eager,
            variant,
            *((name, repr(value)) for name, value in sorted(options.items())),
        )
        if key not in self._programs:
            training = self.training(model, checkpointing=checkpointing)
            if is_eager:
                fields = dataclasses.fields(training)
                training = EagerTraining(**{f.name: getattr(training, f.name) for f in fields})
            self._programs[key] = record_step(training, micro_batch, length, **options)
        return self._programs[key]


def predict_plan(
    program: StepProgram, *, offloads: bool, window: int | str = "layer", **speeds: Any
) -> Prediction:
    """Predict a step that keeps everything, or offloads all but the last layer.

    Copies are waited for at the end of each layer, as PyAO does, unless *window* (as in
    ``PyAOConfig``) says otherwise.
    """
    leaves = [offloads and slot.layer < program.num_layers - 1 for slot in program.slots]
    window = PyAOConfig(policy="all", window=window).effective().window
    window_bytes = None if isinstance(window, str) else window
    return predict(program, leaves, window_bytes=window_bytes, **speeds)


def middle_layer_bytes(program: StepProgram, names: Sequence[str] | None = None) -> int:
    """Return what a middle layer saves, in all or in the slots called *names*."""
    return sum(
        slot.nbytes
        for slot in program.slots
        if slot.layer == 1 and (names is None or slot.name in names)
    )


def layer_ms(program: StepProgram, device: DeviceModel, phase: str) -> float:
    """Return what the operations of a middle layer take in *phase*."""
    times_ms = [
        device.op_ms(operation.flops, operation.traffic_bytes) * operation.num_runs
        for operation in layer_operations(program, phase)
        if operation.is_kernel
    ]
    return float(sum(times_ms))


def layer_operations(program: StepProgram, phase: str) -> list[Operation]:
    """Return the operations of a middle layer in *phase*."""
    assert phase in (FORWARD, BACKWARD)
    return [
        operation
        for segment in program.segments
        if segment.phase == phase and segment.layer == 1
        for operation in program.operations[segment.start : segment.end]
    ]
