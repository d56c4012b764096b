"""Records a training step of a model on fake tensors as a program of plain numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.install.fixed_slots import FixedSettings, FixedSlots
from hf_pyao.auto.install.installed_parts import InstalledParts
from hf_pyao.auto.install.wiring import make_engine, make_lifecycle
from hf_pyao.auto.recording.few_parts import few_parts
from hf_pyao.auto.recording.quantised_copies import tensors_beside
from hf_pyao.auto.recording.shrunk_model import EqualLayers
from hf_pyao.auto.recording.streamable_tensors import streamable_tensors
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.rerun.bare_thread import bare_thread
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.levers import NO_LEVERS, Levers, LeversRefusedError
from hf_pyao.model.fake_cuda.quiet import FAKE_TENSORS, quiet
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.sharding import is_sharded_by_zero
from hf_pyao.model.map.wrappers import plain_path, unwrap_model
from hf_pyao.plan.documents.plan import OFFLOAD, RECOMPUTE, Plan
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.policies.by_name import make_policy
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from hf_pyao.plan.step.collectives import Exchanged
from hf_pyao.plan.step.recorded_step import RecordedStep
from hf_pyao.plan.step.recording_mode import (
    RECORDING,
    RecordingMode,
    RecordingStore,
    RecordingTransport,
)
from hf_pyao.plan.step.resizes import sees_resizes
from hf_pyao.plan.step.step_recorder import StepRecorder
from hf_pyao.training_engines import compiled_part, local_part, stays_whole

Parameters = ParamSpec("Parameters")


class FakeStep(Protocol):
    """A training step that can be run on fake tensors."""

    @property
    def kernels(self) -> KernelSettings:
        """The device and the process that workspaces of kernels are computed for."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where the step computes; None: all its tensors are there."""
        ...

    def model(self) -> AbstractContextManager[tuple[nn.Module, FakeTensorMode]]:
        """Make the model; everything of it happens in here."""
        ...

    def let_gradients_go(self, model: nn.Module) -> None:
        """Move gradients off the device as they are complete, if training does."""
        ...

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of the optimizer's states on the device."""
        ...

    def run(
        self, model: nn.Module, label: Callable[[Tensor, str], None], exchanged: Exchanged
    ) -> None:
        """Run forward, loss and backward.

        Args:
            model: as :meth:`model` made it, with the levers on it.
            label: is told of tensors that have a name.
            exchanged: is told of collectives.
        """
        ...


class _LayersAreMissingError(Exception):
    """The step failed where some layers stood for others."""


def _with_all_layers_if_it_must(
    record: Callable[Parameters, tuple[RecordedStep, int]],
) -> Callable[Parameters, tuple[RecordedStep, int]]:
    """Record again with all layers if a step fails without: its code may count its layers."""

    @functools.wraps(record)
    def recorded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> tuple[RecordedStep, int]:
        with quiet() if kwargs.get("is_other") else nullcontext():
            try:
                return record(*args, **kwargs)
            except _LayersAreMissingError:
                kwargs["is_whole"] = True
                return record(*args, **kwargs)

    return recorded


@_with_all_layers_if_it_must
def record_fake_step(
    step: FakeStep,
    *,
    levers: Levers = NO_LEVERS,
    recompute_modules: Sequence[str] = (),
    plan: Plan | None = None,
    keep_last_layers: int = 0,
    layers: Sequence[str] = (),
    is_whole: bool = False,
    is_other: bool = False,
    equal_layers: EqualLayers | None = None,
) -> tuple[RecordedStep, int]:
    """Run *step* once; return it, and the number of chunks that the head loss took (0: none).

    Args:
        step: the model, and how it is trained.
        levers: what changes the step itself.
        recompute_modules: ``PyAOConfig.recompute_modules``.
        plan: what is recomputed beside; what it offloads or keeps is not looked at.
        keep_last_layers: last layers in which nothing is recomputed; a plan says which of the
            others are kept. With more than one, all layers are run.
        layers: ``PyAOConfig.layers``; where they are named, all are run.
        is_whole: run all layers, also where some stand for others. They are run too where the
            step fails without (a model that takes the hidden states of a certain layer).
        is_other: *levers* are looked at beside those that are configured. Nothing is said of the
            step, and with segments each layer has to take part.
        equal_layers: what is known of its layers from them; None: nothing.

    Raises:
        ConfigError: the head is not one that the chunked loss understands.
        LeversRefusedError: a layer does not take part that has to.
    """
    config = PyAOConfig.from_dict(
        {
            **RECORDING,
            **levers.settings(),
            "recompute_modules": tuple(recompute_modules),
            "keep_last_layers": keep_last_layers,
        }
    )
    with bare_thread(), quiet(FAKE_TENSORS), step.model() as (model, fake_mode):
        state_bytes = step.state_bytes(model)
        compiles = compiled_part(model) is not None
        # Of the layers that stand for others, the one behind them runs the same.
        recomputes = bool(recompute_modules) or plan is not None
        runs_all = (
            is_whole
            or bool(layers)
            or levers.checkpoint_every > 1  # longer segments end where the model says
            or (recomputes and keep_last_layers > 1)
        )
        removed = None if runs_all else (equal_layers or EqualLayers()).remove(model)
        step.let_gradients_go(model)
        recorder = StepRecorder(fake_mode, step.kernels, step.device)
        store = RecordingStore()
        link = LinkContext(RecordingTransport(recorder), store, 0)
        found = find_layers(model, layers)
        policy = make_policy(config) if plan is None else PlanPolicy(_all_leaves(plan))
        fixed = FixedSettings(
            recompute_modules=tuple(recompute_modules), keep_last_layers=keep_last_layers
        )
        policy = FixedSlots.of(found, fixed, levers).around(policy)
        runs_again = bool(levers.checkpoint_every)
        engine = make_engine(model, policy, link, codec=config.codec, enters_always=runs_again)
        lifecycle = make_lifecycle(engine, found, levers)
        installed = InstalledParts()
        installed.put_on(model, found, lifecycle, levers)
        try:
            lifecycle.install()
            names = [name for name, _ in found.layers]
            # Nothing of a layer that runs again as a whole is rebuilt by itself.
            # Nor where weights are gone by then: no saved tensor is recomputed under ZeRO-3.
            # Nor inside of compiled code.
            has_graph = not levers.checkpoint_every and not compiles
            with_graph = has_graph and not is_sharded_by_zero(model)
            recorder.begin(names, store.owns, with_graph=with_graph)
            engine.observe(recorder)
            resident_bytes = recorder.note_residents(
                _named_tensors(model), streamable_tensors(model, found)
            )
            with (
                RecordingMode(recorder, compiles=compiles),
                sees_resizes(recorder.resized),
                few_parts(recorder),
            ):
                step.run(model, recorder.label, recorder.exchanged)
        except Exception as error:
            if removed is None:
                raise
            raise _LayersAreMissingError from error
        finally:
            installed.put_back_forwards()
            lifecycle.remove()
            if removed is not None:
                removed.put_back()
        loss, tiles = installed.head_loss, installed.mlp_tiles
        num_chunks = 0 if loss is None else int(loss.metrics()["head_loss_num_chunks"])
        if is_other and lifecycle.refused:
            raise LeversRefusedError(f"a layer does not run again: {lifecycle.refused}")
        program = recorder.program(resident_bytes + state_bytes)
        cut = None if tiles is None else tiles.last_plan
        if cut is not None:
            program = dataclasses.replace(
                program, num_tiles=cut.num_tiles, num_tiled_tokens=cut.num_tokens
            )
    if removed is None:
        return RecordedStep(program, program.layer_names, 0), num_chunks
    return RecordedStep(program, removed.layer_names, removed.nbytes), num_chunks


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of *model*, named as its layers are; tied ones by each name.

    Those that only a wrapper around the model has come last, as tokens that PEFT trains. Of what is
    sharded this rank's part is meant; what stays whole beside it comes once more.
    """
    plain = unwrap_model(model)
    known: set[int] = set()
    for name, tensor in (*plain.named_parameters(remove_duplicate=False), *plain.named_buffers()):
        known.add(id(tensor))
        yield plain_path(name), local_part(tensor)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in known:
            yield plain_path(name), local_part(tensor)
    for name, tensor in model.named_parameters():
        if stays_whole(tensor):
            yield plain_path(name), tensor
    for name, tensor in tensors_beside(plain):
        yield plain_path(name), tensor


def _all_leaves(plan: Plan) -> Plan:
    """Return *plan* with everything offloaded that it does not recompute."""
    recomputed = [slot for slot in plan.slots if slot.action == RECOMPUTE]
    slots = [dataclasses.replace(slot, otherwise=OFFLOAD, codec=None) for slot in recomputed]
    return dataclasses.replace(plan, slots=slots, otherwise=OFFLOAD)
