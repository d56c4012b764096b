"""The step of a model that FSDP2 has sharded, on fake tensors, beside the real one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.recording.model_copy import CopiedStep, CopyError
from hf_pyao.auto.recording.seen_forward import seen_forward
from hf_pyao.auto.recording.step_recording import record_fake_step
from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.documents.schema import read_json
from hf_pyao.plan.predict.predict import predict
from hf_pyao.plan.step.ledger import MemoryLedger, NotingMode
from hf_pyao.plan.step.resizes import sees_resizes
from hf_pyao.plan.step.step_program import Operation, StepProgram
from tests.helpers import EVERY_LAYER, Batch, tiny_batch, tiny_model
from tests.helpers.ranks import first_of_four_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Shard = Callable[..., Any]


@pytest.fixture
def world() -> Iterator[None]:
    with first_of_four_ranks():
        yield


def layers_of(model: Any) -> list[nn.Module]:
    return list((model.model.decoder if hasattr(model.model, "decoder") else model.model).layers)


def units(model: nn.Module, **options: Any) -> None:
    """One unit a layer, and one for the rest."""
    for layer in layers_of(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def over_two_dimensions(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    units(model, mesh=mesh)


def without_a_root(model: nn.Module) -> None:
    for layer in layers_of(model):
        fully_shard(layer)


def with_the_head_in_a_group(model: Any) -> None:
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


def within_layers(model: Any) -> None:
    for layer in layers_of(model):
        fully_shard(layer.mlp)
    units(model)


def gathered_ahead(model: Any) -> None:
    units(model)
    layers: list[Any] = layers_of(model)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - 2) : number][::-1])


def frozen_below(model: Any) -> None:
    for layer in layers_of(model)[:2]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    units(model, mp_policy=HALF)


WAYS: dict[str, tuple[str, Shard]] = {
    "plain": ("llama", units),
    "mixed precision": ("llama", lambda model: units(model, mp_policy=HALF)),
    "tied weights": ("opt", lambda model: units(model, mp_policy=HALF)),
    "resident": ("llama", lambda model: units(model, reshard_after_forward=False)),
    "as many ranks as there are": ("llama", lambda model: units(model, reshard_after_forward=4)),
    "shards on the host": (
        "llama",
        lambda model: units(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ),
    "two dimensions": ("llama", over_two_dimensions),
    "no root": ("llama", without_a_root),
    "a group": ("llama", with_the_head_in_a_group),
    "units in units": ("llama", within_layers),
    "gathered ahead": ("llama", gathered_ahead),
    "frozen below": ("llama", frozen_below),
}


def sharded(way: str, num_layers: int = 3) -> tuple[nn.Module, Batch]:
    """Return a model of which every layer is a unit, after a micro-batch, and a batch."""
    architecture, shard = WAYS[way]
    model = tiny_model(architecture, num_hidden_layers=num_layers)
    shard(model)
    assert all(isinstance(layer, FSDPModule) for layer in layers_of(model))
    batch = {**tiny_batch(), "use_cache": False}
    model(**batch).loss.backward()
    model.zero_grad()
    return model, batch


def recorded(model: nn.Module, batch: Batch, *, is_whole: bool = False) -> StepProgram:
    step = CopiedStep(model, seen_forward((), batch))
    return record_fake_step(step, is_whole=is_whole)[0].whole()


@pytest.mark.usefixtures("world")
def test_a_resharding_to_fewer_ranks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model: Any = tiny_model("llama")
    units(model, reshard_after_forward=2)
    why = "resharded to 2 ranks after its forward"
    batch = {**tiny_batch(), "use_cache": False}
    model(**batch).loss.backward()
    with pytest.raises(CopyError, match=why):
        recorded(model, batch)
    config = PyAOConfig(min_bytes=0, device_memory_gib=1e-6, profile_steps=1, host_memory_gib=0.1)
    with attach(model, config) as offloader:
        for _ in range(3):
            model(**batch).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
    (line,) = (each for each in caplog.messages if each.startswith("policy 'auto'"))
    assert line.startswith("policy 'auto' goes on offloading everything")
    assert why in line


def counted_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the peak of a real step that keeps everything, inputs included."""
    ledger = MemoryLedger()
    shards = [getattr(each, "_local_tensor", each) for each in model.parameters()]
    ledger.note([*shards, *model.buffers()])
    ledger.note([each for each in batch.values() if isinstance(each, torch.Tensor)])
    with NotingMode(ledger), sees_resizes(ledger.resized):
        outputs = model(**batch)
        outputs.loss.backward()
    return ledger.peak_bytes


def check(way: str, num_layers: int = 3) -> None:
    """Compare the recorded step with the real one: saved bytes, and the peak."""
    model, batch = sharded(way, num_layers)
    before = {name: value.to_local().clone() for name, value in sharded_parameters(model)}
    program = recorded(model, batch)
    for name, value in sharded_parameters(model):
        assert torch.equal(value.to_local(), before[name])
        assert value.grad is None
    kept = predict(program, [False] * len(program.slots), window_bytes=0)
    counted = counted_bytes(model, batch)
    assert kept.peak_bytes == pytest.approx(counted, rel=MOST_OFF)
    model.zero_grad()
    with attach(model, EVERY_LAYER) as offloader:
        model(**batch).loss.backward()
        moved = offloader.metrics()["offloaded_bytes"]
    assert sum(slot.link_bytes for slot in program.slots) == moved > 0


MOST_OFF = 0.1
"""By what share the predicted peak may be off; a run measures the difference."""


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return (each for each in model.named_parameters() if hasattr(each[1], "to_local"))


@pytest.mark.usefixtures("world")
def test_a_recorded_step_takes_the_bytes_of_the_real_one() -> None:
    check("mixed precision")


@pytest.mark.thorough
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.sampled(every=1000)
def test_each_way_to_shard_takes_the_bytes_of_the_real_one(way: str) -> None:
    check(way)


@pytest.mark.thorough
@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_compiled_layers_let_go_of_their_weights_too() -> None:
    model, batch = tiny_model("llama", num_hidden_layers=5), {**tiny_batch(), "use_cache": False}
    for layer in layers_of(model):
        layer.compile(backend="aot_eager")
    units(model)
    model(**batch).loss.backward()
    model.zero_grad()
    program = recorded(model, batch)
    kept = predict(program, [False] * len(program.slots), window_bytes=0)
    assert kept.peak_bytes == pytest.approx(counted_bytes(model, batch), rel=MOST_OFF)


@pytest.mark.thorough
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("way", ["plain", "mixed precision", "resident", "two dimensions"])
@pytest.mark.sampled(every=1000)
def test_four_layers_tell_of_six(way: str) -> None:
    check(way, num_layers=6)


@pytest.mark.usefixtures("world")
def test_gradients_that_are_not_reduced_stay_whole() -> None:
    model, batch = sharded("plain")
    assert isinstance(model, FSDPModule)
    before = recorded(model, batch)
    model.set_requires_gradient_sync(False)
    program = recorded(model, batch)
    assert not any(is_collective(each, gathers=False) for each in program.operations)
    whole = [b for b in program.buffers if b.death >= program.num_operations]
    sharded_too = [b for b in before.buffers if b.death >= before.num_operations]
    sums = [sum(each.nbytes for each in buffers) for buffers in (whole, sharded_too)]
    others_bytes = 3 * sum(p.to_local().nbytes for _, p in sharded_parameters(model))
    assert sums[0] - sums[1] == pytest.approx(others_bytes, rel=MOST_OFF)


@pytest.mark.usefixtures("world")
def test_collectives_are_a_part_of_the_recorded_step() -> None:
    model, batch = sharded("mixed precision")
    operations = recorded(model, batch).operations
    gathers = [each.collective.nbytes for each in operations if is_collective(each, gathers=True)]
    reduces = [each.collective.nbytes for each in operations if is_collective(each, gathers=False)]
    bytes_of_unit = [  # in bfloat16, three of four ranks' parts
        sum(2 * p.numel() for p in parameters) * 3 // 4
        for parameters in (
            *(list(layer.parameters()) for layer in layers_of(model)),
            [p for n, p in model.named_parameters() if ".layers." not in n],
        )
    ]
    layers, root = bytes_of_unit[:-1], bytes_of_unit[-1]
    # The root's weights stay for backward; gradients are reduced in float32.
    assert gathers == [root, *layers, *reversed(layers)]
    assert reduces == [2 * each for each in (*reversed(layers), root)]
    num_queued, awaited = 0, []
    for each in operations:
        if each.awaits and each.collective is None:
            awaited.append(num_queued - each.awaits)
        num_queued += each.collective is not None
    is_gather = [each.collective.is_gather for each in operations if each.collective]
    assert awaited == [number for number, gathers in enumerate(is_gather) if gathers]


def is_collective(operation: Operation, *, gathers: bool) -> bool:
    found = operation.collective
    return found is not None and found.is_gather == gathers


@pytest.mark.usefixtures("world")
def test_collectives_are_timed_while_a_profile_is_made(tmp_path: Path) -> None:
    model, batch = sharded("plain")
    own = collectives_of(model)
    path = tmp_path / "profile.json"
    settings = PyAOConfig(policy="all", min_bytes=0, profile=str(path), profile_steps=2)
    with attach(model, settings):
        for step in range(3):
            model(**batch).loss.backward()
            assert (collectives_of(model) == own) == (step > 0), "of two micro-batches"
    profile = Profile.from_dict(read_json(path))
    assert profile.collective_gib_per_s is not None
    assert profile.collective_gib_per_s > 0
    assert profile.program is not None


def collectives_of(model: nn.Module) -> list[Any]:
    """Return what runs the collectives of each unit."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return [each for g in groups for each in (g._all_gather_comm, g._reduce_scatter_comm)]
