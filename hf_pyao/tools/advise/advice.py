"""What a script's step takes on a card as it is, and with the settings that are worth having."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.attachment import offloader_of
from hf_pyao.auto.recording.model_copy import CopiedStep
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.torch_hooks.layer_inputs import tensors_in
from hf_pyao.errors import ConfigError
from hf_pyao.hf.flags import flags_of
from hf_pyao.hf.micro_batch.memory_beside import states_share
from hf_pyao.levers import NO_LEVERS, Levers, LeversRefusedError, or_refuse
from hf_pyao.model.fake_cuda.cuda_choices import choices_of_cuda
from hf_pyao.model.fake_cuda.cuda_operations import operations_of_cuda
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.hardware.beside_step import implementation_of, optimizer_requests
from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.presets import Hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.predict.optimizer_step import gradients_of
from hf_pyao.plan.predict.peak_cause import PeakCause, peak_cause
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.predictor.predictor import Card, Predictor, SizedPlan
from hf_pyao.plan.predictor.steps import gradients_held
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.advise.script_watch import SeenTraining

MOST_SETTINGS = 3
"""Settings that are told of."""

LEAST_SAVED = 0.97
"""A slower setting is worth having if it takes no more than this share of a faster one's memory."""

AS_IT_IS = PyAOConfig(policy="off")

CANDIDATES = (
    AS_IT_IS,
    PyAOConfig(policy="off", head_loss="chunked"),
    PyAOConfig(policy="auto"),
    PyAOConfig(policy="auto", head_loss="chunked"),
    PyAOConfig(policy="all"),
    PyAOConfig(policy="all", head_loss="chunked"),
    PyAOConfig(policy="all", long_context=True),
)
"""Settings that are predicted."""

SHARES = (0.0, 0.5)
"""Policy ``auto`` is predicted also within the least memory that it needs, and half way to what it
could have."""


@dataclass(frozen=True, kw_only=True)
class AdvisedSetting:
    """A setting, and what the step takes with it."""

    config: PyAOConfig
    plan: SizedPlan

    @property
    def memory_bytes(self) -> int:
        """What has to be reserved: weights, gradients, states, activations and workspaces."""
        return self.plan.reserved_bytes or self.plan.peak_bytes

    @property
    def flags(self) -> str:
        """The setting as flags of a script that uses ``PyAOTrainingArguments``; empty for none."""
        return "" if self.config == AS_IT_IS else flags_of(self.config)

    @property
    def python(self) -> str:
        """The setting as an expression."""
        given = self.config.given.items()
        return f"PyAOConfig({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is said of a script."""

    step_shapes: Sequence[str]
    """The arguments of the model in the step that was looked at."""
    as_it_is: AdvisedSetting
    """Nothing offloaded."""
    cause: PeakCause
    """What sets its peak."""
    settings: Sequence[AdvisedSetting]
    """Those worth having, the fastest first; where none fits, those with the least memory."""
    state_bytes: int
    """Of the optimizer, on the device."""
    accumulates: bool
    limit_bytes: int


class CardStep(CopiedStep):
    """A step of a fake copy of a model with the operations that a CUDA device would run."""

    def __init__(self, found: SeenTraining, kernels: KernelSettings, *, is_elsewhere: bool) -> None:
        super().__init__(found.model, found.seen)
        self._card_kernels = kernels
        self._is_elsewhere = is_elsewhere

    @property
    def kernels(self) -> KernelSettings:
        """Those of the card."""
        return self._card_kernels

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Make the copy."""
        with ExitStack() as stack:
            found = stack.enter_context(super().model())
            if self._is_elsewhere:
                choices = choices_of_cuda(has_padding=self._seen.has_padding)
                stack.enter_context(operations_of_cuda(*choices, kernels=self._card_kernels))
            yield found

    def run(
        self, model: nn.Module, label: Callable[[Tensor, str], None], exchanged: Exchanged
    ) -> None:
        """Run forward, loss and backward; what modules outside of layers return is named."""
        layers = tuple(f"{name}." for name, _ in find_layers(model).layers)
        handles = []
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None
            if is_leaf and not f"{name}.".startswith(layers):
                handles.append(module.register_forward_hook(_namer(name, label)))
        try:
            super().run(model, label, exchanged)
        finally:
            for handle in handles:
                handle.remove()


def _namer(name: str, label: Callable[[Tensor, str], None]) -> Callable[..., None]:
    """Return a forward hook that names what a module makes."""

    def name_output(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            given = {each.untyped_storage()._cdata for each in tensors_in(args)}
            if output.untyped_storage()._cdata not in given:
                label(output, f"the output of {name}")

    return name_output


class Adviser:
    """Predicts a script's step on a card with any setting.

    Args:
        found: what was seen of the script.
        hardware: the card.
        is_elsewhere: the script ran on another device than the card, such as a CPU.
    """

    def __init__(self, found: SeenTraining, hardware: Hardware, *, is_elsewhere: bool) -> None:
        self._found = found
        self._hardware = hardware
        self._is_elsewhere = is_elsewhere
        self._programs: dict[Levers, StepProgram] = {}
        self._predictors: dict[tuple[str, Levers], Predictor] = {}
        self.state_bytes = state_bytes_of(found)
        offloader = offloader_of(found.model)
        if offloader is not None:
            offloader.detach()  # the step is predicted as it is without

    def advise(self, limit_bytes: int) -> Advice:
        """Predict all candidates, and choose.

        Args:
            limit_bytes: most that may be reserved for the step.

        Raises:
            CopyError: the step cannot be run on fake tensors.
        """
        program = self.program(NO_LEVERS)  # an error of the model's own code ends it here
        late = predict(program, [False] * len(program.slots), window_bytes=None)
        settings = list(self._settings(limit_bytes))
        return Advice(
            step_shapes=self._found.seen.shapes(),
            as_it_is=settings[0],
            cause=peak_cause(program, late),
            settings=worth_having(settings),
            state_bytes=self.state_bytes,
            accumulates=self._found.accumulates,
            limit_bytes=limit_bytes,
        )

    def _settings(self, limit_bytes: int) -> Iterator[AdvisedSetting]:
        """Yield what was predicted; the first is the script as it is."""
        most_bytes = limit_bytes
        for config in CANDIDATES:
            try:
                found = AdvisedSetting(config=config, plan=self._plan(config, limit_bytes))
                yield found
                if config == AS_IT_IS:
                    most_bytes = min(most_bytes, found.memory_bytes)
                if config.policy == "auto":
                    least = AdvisedSetting(config=config, plan=self._plan(config, 0))
                    for share in SHARES:
                        cap_bytes = least.memory_bytes * (1 - share) + most_bytes * share
                        capped = config.with_settings(device_memory_gib=rounded_up(cap_bytes))
                        plan = self._plan(capped, limit_bytes)
                        if plan.fits:
                            yield AdvisedSetting(config=capped, plan=plan)
            except (LeversRefusedError, ConfigError):
                continue  # a head or a layer that does not take part

    def program(self, levers: Levers) -> StepProgram:
        """Return the step with *levers*."""
        if levers not in self._programs:
            step = CardStep(self._found, self._hardware.kernels, is_elsewhere=self._is_elsewhere)
            recorded, num_chunks = record_fake_step(
                step, levers=levers, is_other=levers != NO_LEVERS
            )
            if levers.head_loss == "chunked" and not num_chunks:
                raise LeversRefusedError("the model keeps its own loss")
            program = recorded.whole()
            resident_bytes = program.resident_bytes + self.state_bytes
            program = dataclasses.replace(
                program,
                resident_bytes=resident_bytes,
                optimizer_requests=requests_of(self._found, program),
            )
            accumulates = self._found.accumulates
            self._programs[levers] = gradients_held(program) if accumulates else program
        return self._programs[levers]

    def _plan(self, config: PyAOConfig, limit_bytes: int) -> SizedPlan:
        key = str(config.policy), Levers.of(config)
        if key not in self._predictors:
            hardware = self._hardware
            self._predictors[key] = Predictor(
                lambda _, each: or_refuse(lambda: self.program(each)),
                Card.of(hardware.device, hardware.link),
                PlanRequest.of_config(config, allocator=AllocatorSettings()),
            )
        predictor = self._predictors[key]
        cap_gib = config.device_memory_gib
        most_bytes = limit_bytes if cap_gib is None else min(limit_bytes, int(cap_gib * GIB))
        return predictor.within(1, Way.of_config(config), most_bytes)


def rounded_up(nbytes: float) -> float:
    """Return *nbytes* in GiB, rounded up to hundredths."""
    return math.ceil(nbytes / GIB * 100) / 100


def worth_having(settings: Sequence[AdvisedSetting]) -> list[AdvisedSetting]:
    """Return at most :data:`MOST_SETTINGS`, the fastest first.

    A setting is worth having if no other one takes both less time and about as little memory. Of
    those that fit the fastest is told of, the one with the least memory, and the fastest of those
    between that take no more than half way. Where none fits, those with the least memory are.
    """
    fitting = [each for each in settings if each.plan.fits]
    if not fitting:
        by_memory: list[AdvisedSetting] = []
        for each in sorted(settings, key=lambda each: (each.memory_bytes, each.plan.step_ms)):
            if not by_memory or each.plan.step_ms < by_memory[-1].plan.step_ms:
                by_memory.append(each)
        return by_memory[:MOST_SETTINGS]
    front: list[AdvisedSetting] = []
    for each in sorted(fitting, key=lambda each: (each.plan.step_ms, each.memory_bytes)):
        if not front or each.memory_bytes <= LEAST_SAVED * front[-1].memory_bytes:
            front.append(each)
    if len(front) <= MOST_SETTINGS:
        return front
    fastest, *between, smallest = front
    half_way = (fastest.memory_bytes + smallest.memory_bytes) / 2
    middle = next((each for each in between if each.memory_bytes <= half_way), between[-1])
    return [fastest, middle, smallest]


def state_bytes_of(found: SeenTraining) -> int:
    """Return the bytes of the optimizer's states on the model's device, made already or not."""
    device = next(found.model.parameters()).device.type
    total_bytes = 0
    for optimizer in found.optimizers:
        held = [
            each
            for each in tensors_in(list(optimizer.state.values()))
            if each.device.type == device
        ]
        if held:
            total_bytes += sum(each.nbytes for each in held)
        elif not optimizer.state:
            trained = (p for group in optimizer.param_groups for p in group["params"])
            trained_bytes = sum(p.nbytes for p in trained if p.requires_grad)
            total_bytes += int(states_share(type(optimizer).__name__) * trained_bytes)
    return total_bytes


def requests_of(found: SeenTraining, program: StepProgram) -> tuple[int, ...]:
    """Return what the optimizer's step allocates beside gradients and states after *program*."""
    sizes = [program.buffers[number].nbytes for number in sorted(gradients_of(program))]
    for optimizer in found.optimizers[:1]:  # several share the gradients
        has_moments = "adam" in type(optimizer).__name__.lower()
        return optimizer_requests(sizes, implementation_of(optimizer), has_moments=has_moments)
    return ()


def device_of(found: SeenTraining) -> torch.device:
    """Return where the model is."""
    return next(found.model.parameters()).device
