"""Out of memory where layers run again and MLPs run in tiles: in forward, in what runs again, and
in backward."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.retry.out_of_memory import OutOfDeviceMemoryError
from hf_pyao.errors import PyAOError
from tests.auto.retry import test_out_of_memory_loops as loops
from tests.auto.retry.test_out_of_memory import OFF, assert_clean, check_points
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    assert_same_tensors,
    gradients_of,
    num_hooks,
    tiny_batch,
    tiny_model,
)
from tests.helpers.memory_faults import EVER, MemoryFaults, sample

CASES: dict[str, tuple[str, PyAOConfig]] = {
    "each layer again": ("gpt2", replace(EVERYTHING, checkpoint_every=1)),
    "two layers again": ("llama", replace(EVERY_LAYER, checkpoint_every=2)),
    "nested": ("llama", replace(EVERY_LAYER, checkpoint_every=2, checkpoint_nested=True)),
    "again, and kept": ("opt", replace(OFF, checkpoint_every=2)),
    "tiles": ("llama", replace(EVERYTHING, mlp_tiles=2)),
    "tiles in segments": ("llama", replace(EVERY_LAYER, checkpoint_every=2, mlp_tiles=2)),
    "long context": ("llama", replace(EVERY_LAYER, long_context=True, mlp_tiles=2)),
    "auto": ("llama", PyAOConfig(min_bytes=0, long_context=True, mlp_tiles=2, checkpoint_every=2)),
}


@pytest.fixture(autouse=True)
def _few_objects(small_heap: None) -> None:
    gc.collect()


def test_a_run_completes_with_the_same_bits() -> None:
    check_points("two layers again", 2, CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_run_completes_with_the_same_bits_at_any_allocation(name: str) -> None:
    check_points(name, 60, CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_without_room_at_all_it_ends_with_the_error_and_plain_training_goes_on(name: str) -> None:
    model_type, config = CASES[name]
    model = tiny_model(model_type, dropout=0.1)
    expected = gradients(tiny_model(model_type, dropout=0.1))

    def micro_batch() -> None:
        with MemoryFaults(EVER):
            model(**tiny_batch(), use_cache=False).loss.backward()

    modules = [(name, type(module)) for name, module in model.named_modules()]
    hooks = num_hooks(model)
    offloader = attach(model, config)
    with pytest.raises(OutOfDeviceMemoryError, match="nothing tighter is left") as caught:
        offloader.run_micro_batch(micro_batch)
    assert isinstance(caught.value, PyAOError)
    caught.value.__cause__ = caught.value.__traceback__ = None
    del caught
    assert_clean(offloader)
    assert all(parameter.grad is None for parameter in model.parameters())
    offloader.detach()
    assert num_hooks(model) == hooks
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert _len_torch_dispatch_stack() == 0
    assert_same_tensors(gradients(model), expected, "plain training")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(**tiny_batch(), use_cache=False).loss.backward()
    return gradients_of(model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [{"checkpoint_every": 2}, {"checkpoint_every": 1, "mlp_tiles": 2}]
)
def test_a_trainer_completes_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = replace(EVERY_LAYER, **settings)
    counted = MemoryFaults()
    expected = loops.outcome(loops.run_trainer(tmp_path, counted, config=config))
    for at in sample(len(counted.allocations), 20):
        faults = MemoryFaults({at}, counted.allocations)
        trainer = loops.run_trainer(tmp_path, faults, config=config)
        assert faults.num_raised == 1
        assert_same_tensors(loops.outcome(trainer), expected, f"allocation {at}")
        assert trainer.pyao_offloader is None
