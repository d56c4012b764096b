"""What systems take on a card, by prediction: peaks, host memory and times of one micro-batch.

hf_pyao's own predictor, and what several nodes add: under ZeRO-1 with accumulation all gradients
stay on the device. With int8 the real engine counts on fake tensors what is left of the bytes, and
the predictor's copies are scaled by that; the codec's kernels are not in its times.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.experiment import Options, progress
from experiments.published import SEQUENCE_LENGTH
from experiments.systems import MODELS, System
from hf_pyao.attachment import attach
from hf_pyao.config import DEFAULT_WINDOW_BYTES, PyAOConfig
from hf_pyao.plan.hardware.presets import Hardware, find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.predict.outcome import Outcome
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predictor.largest import largest_on_a_line
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES, build_config, find_size
from hf_pyao.tools.estimate.ways import AUTO, LONG_CONTEXT, METHODS, chunked
from tests.helpers.simulation.fake_peak import UNLIMITED_HOST_GIB
from tests.helpers.simulation.late_transport import LateTransport

HALF_BYTES = 2
"""Bytes of a parameter, and of a gradient as it is sent."""

NOT_TENSORS_BYTES = 1.0e9
"""Context, NCCL, workspaces, a second bucket: the mean of what the paper's two baseline peaks are
above ours (hf_pyao/tools/estimate/PUBLISHED.md). The only constant that was fitted."""

PAPER_CAP_BYTES = 8.68e9
"""Tensors that fit beside it in the paper. Its baseline limits follow from any number between 7.75
and 8.73 GB."""

CARD = "rtx4070"
COUNTED_AT = 2
"""The micro-batch at which a codec's bytes are counted."""

SHADER_TFLOP_PER_S = 29.15
"""An RTX 4070's rate without tensor cores: the slower of the two assumptions."""

ASSUMPTIONS = (
    "operations at the longer of arithmetic and memory traffic, and 3 us: 49.6 TFLOP/s (85 % of "
    "the tensor cores' data sheet) unless said otherwise, 80 % of the memory's data sheet; link "
    "25e9 bytes/s, one copy engine",
    "ZeRO-2: a gradient leaves as it is complete, through a bucket of 1e9 bytes; AdamW is on the "
    "host. ZeRO-1 with accumulation: the same, and gradients of all parameters stay on the device",
    "flash attention, dropout as the configurations have it, no padding, outputs live on in "
    "backward; no fragmentation, no workspaces",
    f"{NOT_TENSORS_BYTES / 1e9:.1f} GB on the device are no tensors (fitted to the paper's two "
    "baseline peaks)",
    "auto: planned for these times and this link in the card's memory less 4 %, what is no tensor "
    "included, with the default window (256 MiB) and one last layer kept; lossless",
    "int8: what it leaves of the bytes is counted on fake tensors by the real engine; times have "
    "its copies, and not its kernels",
)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One micro-batch of a system."""

    peak_bytes: int
    """Tensors on the device, copies as late as they can be."""
    host_bytes: int
    """Most bytes of the host pool in use."""
    timed: Prediction
    """Its times, and what crosses the link."""
    recomputed: tuple[str, ...]
    """Sub-modules that PyAO's rule recomputes."""

    @property
    def device_gb(self) -> float:
        """The peak with what is no tensor, in 1e9 bytes."""
        return (self.peak_bytes + NOT_TENSORS_BYTES) / 1e9


class Predictor:
    """Predicts one model on one card.

    Args:
        architecture: a key of ``systems.MODELS``.
        size: its row in ``hf_pyao/tools/estimate/model_sizes.py``; None: the paper's.
    """

    def __init__(self, architecture: str, size: str | None = None) -> None:
        shape = find_size(architecture, size or PAPER_SIZES[architecture])
        tokens = {} if "vocab_size" in shape.settings else {"vocab_size": 512}
        self.config = build_config(architecture, shape, **tokens)
        self.hardware = find_hardware(CARD)
        self.estimator = Estimator(
            self.config, self.hardware, window="layer", sequence_length=SEQUENCE_LENGTH
        )
        self._counted: dict[tuple[System, int], tuple[int, int]] = {}
        self._num_parameters: int | None = None

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        if self._num_parameters is None:
            with FakeTraining(config=self.config).model() as (model, _):
                self._num_parameters = sum(p.numel() for p in model.parameters())
        return self._num_parameters

    @property
    def gradient_bytes(self) -> int:
        """Of one full gradient, as it is sent."""
        return HALF_BYTES * self.num_parameters

    def at(self, tflop_per_s: float) -> Predictor:
        """Return the same on a card of another speed; what was recorded and flagged stays."""
        device = dataclasses.replace(self.hardware.device, tflop_per_s=tflop_per_s)
        self.estimator.flagged()
        other = copy.copy(self)
        other.hardware = dataclasses.replace(self.hardware, device=device)
        other.estimator = copy.copy(self.estimator)
        other.estimator.hardware = other.hardware
        return other

    def predicted(
        self, system: System, micro_batch: int, cap_bytes: float | None = None
    ) -> Predicted:
        """Predict *system* at *micro_batch*.

        With a codec the peak on the device is that without one: see :meth:`counted`.

        Args:
            system: which.
            micro_batch: samples.
            cap_bytes: of tensors on the device, for ``auto``, which takes the least that it can
                where they do not fit; None: what the card can hold. Others do the same anyway.
        """
        way = self._way(system, micro_batch, cap_bytes)
        peak_bytes, host_bytes = way.late.peak_bytes, way.timed.host_peak_bytes
        timed = way.timed
        if system.codec != "identity":
            ratio = self.codec_ratio(system)
            host_bytes = round(host_bytes * ratio)
            scaled = scale_copies(way.program, ratio)
            timed = predict(
                scaled,
                self.estimator.leaves(_way_of(system), way.program),
                window_bytes=None,
                device=self.hardware.device,
                link=self.hardware.link,
            )
        if system.accumulates:
            peak_bytes += self.gradient_bytes
        return Predicted(
            peak_bytes=peak_bytes,
            host_bytes=host_bytes,
            timed=timed,
            recomputed=self.estimator.flagged() if _way_of(system).policy == "pyao" else (),
        )

    def program(self, system: System, micro_batch: int) -> StepProgram:
        """Return the recorded step of *system*."""
        return self._way(system, micro_batch).program

    def largest(self, system: System, cap_bytes: float = PAPER_CAP_BYTES) -> int:
        """Return the largest micro-batch whose tensors fit into *cap_bytes*; 0 if none does."""
        exact = dataclasses.replace(system, codec="identity")

        def peak_at(size: int) -> int:
            return self.predicted(exact, size, cap_bytes=0).peak_bytes

        return largest_on_a_line(peak_at, int(cap_bytes))

    def codec_ratio(self, system: System) -> float:
        """Return what the codec of *system* leaves of the bytes: the same at any micro-batch."""
        exact = self._way(system, COUNTED_AT).timed.host_peak_bytes
        return self.counted(system, COUNTED_AT)[1] / exact if exact else 1.0

    def counted(self, system: System, micro_batch: int) -> tuple[int, int]:
        """Run the real engine on fake tensors; return the peaks of device and host pool."""
        key = (system, micro_batch)
        if key not in self._counted:
            self._counted[key] = self._count(system, micro_batch)
        return self._counted[key]

    def _count(self, system: System, micro_batch: int) -> tuple[int, int]:
        # The rule times operations, which fake tensors have not: what it flags is named instead.
        flagged = self.estimator.flagged() if system.is_pyao and system.is_selective else ()
        settings = PyAOConfig(
            **{
                **system.settings,
                "policy": "all",
                "recompute_modules": flagged,
                "host_memory_gib": UNLIMITED_HOST_GIB,
            }
        )
        training = FakeTraining(config=self.config)
        with training.model() as (model, fake_mode):
            training.let_gradients_go(model)
            with attach(model, settings, transport=LateTransport()) as offloader:
                ledger = MemoryLedger(offloader.host_pool.owns)
                ledger.note([*model.parameters(), *model.buffers()])
                with NotingMode(ledger, fake_mode):
                    training.run(model, micro_batch, SEQUENCE_LENGTH, ledger.end_phase)
                host_bytes = int(offloader.metrics()["host_peak_bytes"])
        return max(ledger.phase_peak_bytes.values()), host_bytes

    def _way(self, system: System, micro_batch: int, cap_bytes: float | None = None) -> Outcome:
        estimator = self.estimator
        if system.is_auto:  # the same recordings, another window and another limit
            if cap_bytes is None:
                cap_bytes = card_limit_bytes(self.hardware) - NOT_TENSORS_BYTES
            estimator = copy.copy(estimator)
            estimator.window_bytes = DEFAULT_WINDOW_BYTES
            estimator.limit_bytes = int(cap_bytes)
        return estimator.predicted(_way_of(system), micro_batch)[0]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A system at a micro-batch of a model, and what was predicted of it."""

    model: str
    """A key of ``systems.MODELS``."""
    system: System
    micro_batch: int
    sizes: Sequence[int]
    """All micro-batches of the model."""
    predictor: Predictor
    predicted: Predicted

    @property
    def key(self) -> tuple[str, str, int]:
        """What ``published`` calls it."""
        return self.model, self.system.name, self.micro_batch

    @property
    def common(self) -> dict[str, Any]:
        """What its rows have in common."""
        return {
            "model": MODELS[self.model],
            "system": self.system.name,
            "micro_batch": self.micro_batch,
        }


def predictions(
    options: Options,
    what: str,
    micro_batches: Mapping[str, Sequence[int]],
    systems: Sequence[System],
    smoke: Sequence[int] = (1, 2),
) -> Iterator[Point]:
    """Yield the models that are asked for, at each micro-batch with each system.

    Args:
        options: which models.
        what: for the bar.
        micro_batches: by model.
        systems: which.
        smoke: micro-batches of a smoke run.
    """
    for model, predictor in predictors(options, what):
        sizes = smoke if options.is_smoke else micro_batches[model]
        for micro_batch in progress(sizes, model):
            for system in systems:
                yield Point(
                    model=model,
                    system=system,
                    micro_batch=micro_batch,
                    sizes=sizes,
                    predictor=predictor,
                    predicted=predictor.predicted(system, micro_batch),
                )


def predictors(options: Options, what: str) -> Iterator[tuple[str, Predictor]]:
    """Yield the models that are asked for, with what predicts them."""
    for model in progress(options.models, what):
        yield model, Predictor(model, "micro" if options.is_smoke else None)


def _way_of(system: System) -> Way:
    if system.is_long_context:
        return LONG_CONTEXT
    ours = "policy pyao" if system.is_selective else "policy all"
    name = ours if system.is_pyao else "none"
    name = "checkpointing" if system.checkpointing else name
    way = AUTO if system.is_auto else METHODS[name]
    return chunked(way) if system.head_loss == "chunked" else way


def scale_copies(program: StepProgram, ratio: float) -> StepProgram:
    """Return *program* with *ratio* times the bytes on the link, as a codec leaves of them."""
    slots = [
        slot._replace(link_bytes=max(1, round(slot.link_bytes * ratio)) if slot.link_bytes else 0)
        for slot in program.slots
    ]
    return dataclasses.replace(program, slots=slots)


def on_compute_stream_ms(predicted: Predicted, hardware: Hardware) -> float:
    """Return the step if every copy stood in the way of compute: one stream for both."""
    copies_ms = sum(
        hardware.link.copy_ms(direction, predicted.timed.offloaded_bytes)
        for direction in ("offload", "reload")
    )
    return predicted.timed.compute_ms + copies_ms


def card_limit_bytes(hardware: Hardware) -> float:
    """Return what of a card can be used: all but 4 %."""
    return hardware.memory_gib * GIB * 0.96
