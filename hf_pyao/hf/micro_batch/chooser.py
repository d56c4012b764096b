"""Predicts, chooses and tries a Trainer's micro-batch, on one rank.

What each size takes is predicted from a recording on a fake copy of the model; what is chosen is
tried on the model itself, and given up for the next smaller one where memory runs out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pyao.auto.install.fixed_slots import FixedSettings, FixedSlots
from hf_pyao.auto.recording.lever_recording import room_for
from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.engine.stores.host_share import host_limit_bytes
from hf_pyao.errors import ConfigError
from hf_pyao.hf.micro_batch.checks import SETTING
from hf_pyao.hf.micro_batch.memory_beside import library_bytes, memory_beside, nbytes_of
from hf_pyao.hf.micro_batch.sample_batches import SampleBatches
from hf_pyao.hf.micro_batch.trial_step import try_step
from hf_pyao.levers import NO_LEVERS, Levers
from hf_pyao.metrics import format_bytes
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import unwrap_parallel
from hf_pyao.plan.documents.plan import Plan
from hf_pyao.plan.hardware.device_limit import allocator_settings, beside_bytes, device_limit
from hf_pyao.plan.hardware.device_speeds import hardware_of
from hf_pyao.plan.options.auto_plan import plan_of_choice
from hf_pyao.plan.options.plan_request import PlanRequest
from hf_pyao.plan.policies.budget import leaving
from hf_pyao.plan.policies.by_name import make_policy
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from hf_pyao.plan.predictor.choice import SizeChoice, choose_micro_batch, divisors_of, in_words
from hf_pyao.plan.predictor.predictor import Card, Predictor, SizedPlan
from hf_pyao.plan.predictor.steps import Steps, gradients_held
from hf_pyao.plan.predictor.way import Way
from hf_pyao.plan.solve.planner import OFFLOAD_ALL
from hf_pyao.plan.solve.steering import PRESET
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.text import describe_error

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenBatch:
    """What a Trainer is to train with."""

    micro_batch: int
    accumulation: int
    words: str
    """What was chosen, and why."""
    plan: Plan | None = None
    """What policy ``auto`` is to follow from the start, where offloading everything, which it
    would do while it measures, does not fit; None: it may measure."""


class MicroBatchChooser:
    """Predicts, chooses and tries, on one rank."""

    def __init__(self, trainer: Any, config: PyAOConfig) -> None:
        args: TrainingArguments = trainer.args
        self._trainer = trainer
        self._config = config
        self._device: torch.device = args.device
        self._model: nn.Module = unwrap_parallel(trainer.model)
        self._old = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
        self._global_batch = self._old[0] * self._old[1]
        self._more_bytes = sum(each.nbytes for each in memory_beside(trainer, self._model))
        self._is_auto = config.policy == "auto"
        self._found: dict[int, SizedPlan] = {}

    def choose(self) -> ChosenBatch:
        """Choose."""
        limit_bytes = self._limit_bytes()
        if limit_bytes is None:
            label = self._config.label("device_memory_gib")
            return self._as_it_is(
                f"how much memory {self._device} has is not known; give {label}"
                if self._device.type != "cpu"
                else f"on a CPU there is no device memory to fit; give {label} to choose for a "
                "device of that size"
            )
        batches = SampleBatches(self._trainer.get_train_dataloader())
        try:
            choice = self._predicted(batches, limit_bytes)
        except (CopyError, torch.OutOfMemoryError) as error:
            # It cannot run on fake tensors, or there is no room to measure the device's speed.
            return self._as_it_is(f"nothing can be predicted: {describe_error(error)}")
        wanted = choice.chosen
        if wanted is None and self._device.type != "cpu":
            wanted = choice.rows[0]  # predictions are on the high side: what is tried decides
        if wanted is None:
            raise ConfigError(f"{SETTING}: {choice.reason}", key="micro-batch-not-chosen")
        return self._tried(batches, choice, wanted.micro_batch, limit_bytes)

    def configured_step(self) -> StepProgram:
        """Return the step of the Trainer's own micro-batch, as it is configured.

        Raises:
            ConfigError: the data can only be iterated, or there is none.
            CopyError: it cannot run on fake tensors.
        """
        batches = SampleBatches(self._trainer.get_train_dataloader())
        return self._recorded(batches, self._old[0], Levers.of(self._config))

    def _as_it_is(self, why: str) -> ChosenBatch:
        micro_batch, accumulation = self._old
        return ChosenBatch(
            micro_batch=micro_batch,
            accumulation=accumulation,
            words=f"hf_pyao leaves the micro-batch at {micro_batch} (auto_micro_batch): {why}",
        )

    def _limit_bytes(self) -> float | None:
        """Return the most bytes that the step may have on the device; None: it is not known.

        Without what is there besides already: another model, states of an optimizer.
        """
        config = self._config
        label = config.label("device_memory_gib")
        limit = device_limit(self._device, config.device_memory_gib, label)
        if limit is None:
            return None
        resident_bytes = nbytes_of(self._model) if self._is_placed() else 0
        return limit.nbytes - beside_bytes(limit, resident_bytes, self._model.parameters())

    def _is_placed(self) -> bool:
        return next(self._model.parameters()).device.type == self._device.type

    # ---- predicted -----------------------------------------------------------------------------

    def _predicted(self, batches: SampleBatches, limit_bytes: float) -> SizeChoice:
        hardware, binds = hardware_of(self._device), self._request()
        steps = Steps(lambda size, levers: self._recorded(batches, size, levers))

        def step_at(size: int, levers: Levers) -> StepProgram:
            program = steps.at(size, levers)
            return gradients_held(program) if size < self._global_batch else program

        card = Card.of(hardware.device, hardware.link, PRESET)
        predictor = Predictor(step_at, card, binds)

        def best_at(size: int) -> SizedPlan:
            found = predictor.within(size, Way.of_config(self._config), limit_bytes)
            self._found[size] = found
            return found

        return choose_micro_batch(
            best_at,
            limit_bytes=limit_bytes,
            global_batch=self._global_batch,
            sequence_length=batches.length,
            find=self._config.auto_micro_batch,
        )

    def _request(self) -> PlanRequest:
        config = self._config
        request = PlanRequest.of_config(
            config,
            recomputed_paths=self._recomputed_paths(),
            host_limit_bytes=host_limit_bytes(config.host_memory_gib),
            allocator=allocator_settings(self._device),
        )
        return dataclasses.replace(request, room=room_for(request.room, self._model, config.layers))

    def _recomputed_paths(self) -> tuple[str, ...]:
        found = find_layers(self._model, self._config.layers)
        settings = FixedSettings.of(self._config.effective(), self._config.all_labels())
        return FixedSlots.of(found, settings, NO_LEVERS).recomputed_paths

    def _recorded(self, batches: SampleBatches, size: int, levers: Levers) -> StepProgram:
        """Return the step of a fake copy of the model at a micro-batch, with *levers*."""
        with self._autocast():
            seen = seen_forward((), self._inputs(batches, size))
        config = self._config
        recomputes = bool(config.recompute_modules) and not self._is_auto  # 'auto' plans it
        recorded, _ = record_fake_step(
            CopiedStep(self._model, seen),
            levers=levers,
            recompute_modules=config.recompute_modules if recomputes else (),
            keep_last_layers=config.effective().keep_last_layers if recomputes else 0,
            layers=config.layers,
            is_other=levers != Levers.of(config),
        )
        program = recorded.whole()
        return dataclasses.replace(
            program,
            resident_bytes=program.resident_bytes + self._more_bytes + library_bytes(self._device),
        )

    def _inputs(self, batches: SampleBatches, size: int) -> dict[str, Any]:
        return dict(self._trainer._prepare_inputs(batches.batch(size)))

    def _autocast(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._trainer.accelerator.autocast()
        return found

    # ---- tried ---------------------------------------------------------------------------------

    def _tried(
        self, batches: SampleBatches, choice: SizeChoice, wanted: int, limit_bytes: float
    ) -> ChosenBatch:
        """Try *wanted*, and what is smaller where it does not fit.

        Raises:
            ConfigError: not even a single sample fits.
        """
        if not self._is_placed():
            why = "not tried, since the model is not on the device yet"
            return self._chosen(wanted, choice, limit_bytes, why, ())
        failed: list[int] = []
        sizes = [size for size in divisors_of(self._global_batch) if size in self._found]
        for size in reversed([size for size in sizes if size <= wanted]):
            trial = try_step(
                self._model,
                self._trial_config(size),
                lambda size=size: self._inputs(batches, size),  # type: ignore[misc]
                autocast=self._autocast,
                num_runs=1 if size == self._global_batch else 2,
                reserved_bytes=self._more_bytes,
            )
            if trial.has_run and (trial.peak_bytes or 0) <= self._tried_limit():
                tried = _measured(trial.peak_bytes)
                return self._chosen(size, choice, limit_bytes, tried, failed)
            failed.append(size)
        raise ConfigError(
            f"{SETTING}: micro-batches {', '.join(map(str, failed))} were tried, and memory ran "
            f"out; {choice.reason} Take shorter sequences, head_loss='chunked', or a larger "
            "device.",
            key="micro-batch-not-chosen",
        )

    def _tried_limit(self) -> float:
        """Return the most that a step that was tried may have taken: a cap, where one is given."""
        cap_gib = self._config.device_memory_gib
        return float("inf") if cap_gib is None else cap_gib * GIB

    def _trial_config(self, size: int) -> PyAOConfig:
        config, found = self._config, self._found[size]
        plain: dict[str, Any] = {"report": None, "profile": None, "auto_micro_batch": "off"}
        plan = self._plan(size)
        if plan is None or found.chosen is None:
            return dataclasses.replace(config, **plain)
        candidate = found.chosen.candidate
        return dataclasses.replace(
            config,
            **plain,
            **found.chosen.levers.settings(),
            policy=PlanPolicy(plan, int(config.min_bytes), "auto"),
            plan=None,
            recompute_modules=(),  # in the plan
            window="layer" if candidate.window_bytes is None else candidate.window_bytes,
            keep_last_layers=candidate.keep_last_layers,
        )

    def _plan(self, size: int) -> Plan | None:
        chosen = self._found[size].chosen
        return None if chosen is None else plan_of_choice(chosen)

    def _needs_plan(self, size: int, limit_bytes: float) -> bool:
        """Say whether offloading everything would not fit."""
        chosen = self._found[size].chosen
        everything = None if chosen is None else chosen.configured.simple().get(OFFLOAD_ALL)
        return everything is not None and not everything.memory.fits(limit_bytes)

    def _chosen(
        self, size: int, choice: SizeChoice, limit_bytes: float, tried: str, failed: Sequence[int]
    ) -> ChosenBatch:
        accumulation = self._global_batch // size
        gave_up = ""
        if failed:
            gave_up = f" Memory ran out as {', '.join(map(str, failed))} was tried."
        length = choice.rows[0].sequence_length
        does = f"trains with {in_words(size, accumulation)} instead of {in_words(*self._old)}"
        if (size, accumulation) == self._old:
            does = f"keeps {in_words(size, accumulation)}"
        return ChosenBatch(
            micro_batch=size,
            accumulation=accumulation,
            words=(
                f"hf_pyao {does}, {tried}.{gave_up} Predicted for samples of {length} "
                f"tokens: {choice.reason}"
            ),
            plan=self._plan(size) if self._needs_plan(size, limit_bytes) else None,
        )


def _measured(peak_bytes: int | None) -> str:
    if peak_bytes is None:
        return "which was tried"
    return f"which was tried (peak {format_bytes(peak_bytes)})"


def leaves_of(config: PyAOConfig, program: StepProgram) -> list[bool]:
    """Return which slots leave under a policy that looks at no times."""
    kept = Levers.of(config).kept_layers(program.num_layers, config.effective().keep_last_layers)
    return leaving(program, make_policy(config), kept)
