"""Loops that call backward by themselves: after a second run that failed, layers run once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task
from hf_pyao.errors import RecomputationError, SavedTensorModifiedError
from tests.helpers import tiny_batch, tiny_model

EVERYTHING = PyAOConfig(policy="all", min_bytes=256, keep_last_layers=0, verify_recompute="off")
WAYS: dict[str, dict[str, Any]] = {
    "each layer": {"checkpoint_every": 1},
    "two layers": {"checkpoint_every": 2},
    "two layers, nested": {"checkpoint_every": 2, "checkpoint_nested": True},
    "tiles": {"mlp_tiles": 3},
    "tiles in layers": {"mlp_tiles": 2, "checkpoint_every": 1},
}


class WorldError(Exception):
    """Something outside of the model has gone."""


class World:
    """What a module needs from outside of the model, which may be gone when backward runs."""

    def __init__(self, module: nn.Module, gone: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.is_gone = False
        self.num_second_runs = 0
        own = module.forward

        def forward(hidden: torch.Tensor, *args: Any) -> Any:
            is_second = current_graph_task() != NO_TASK
            self.num_second_runs += is_second
            return own(gone(hidden) if is_second and self.is_gone else hidden, *args)

        module.forward = forward  # type: ignore[method-assign]


def raises(hidden: torch.Tensor) -> torch.Tensor:
    raise WorldError("the file is closed")


def is_wider(hidden: torch.Tensor) -> torch.Tensor:
    return torch.sin(hidden.double()).float()  # saves a tensor more than forward did


def runs_out_of_memory(hidden: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def step(model: nn.Module) -> list[torch.Tensor]:
    """Run a micro-batch; return its gradients."""
    model.zero_grad()
    model(**tiny_batch(), use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "could not run again" in r.getMessage()]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("way", "gone"),
    [
        *((way, raises) for way in WAYS),
        # Tiles save nothing in forward: values alone may differ, which fingerprints tell.
        *((way, is_wider) for way in WAYS if "tiles" not in way),
    ],
)
def test_the_next_forward_does_without_second_runs(way, gone, caplog):
    model = tiny_model("llama")
    expected = step(model)
    world = World(model.model.layers[1].mlp, gone)

    with caplog.at_level(logging.WARNING), attach(model, replace(EVERYTHING, **WAYS[way])):
        found = step(model)
        # Tiles add gradients of weights in another order.
        atol = 1e-6 if "tiles" in way else 0.0
        assert all(torch.allclose(a, b, 0.0, atol) for a, b in zip(expected, found, strict=True))
        assert world.num_second_runs
        world.is_gone = True
        with pytest.raises((WorldError, RecomputationError)):
            step(model)
        world.num_second_runs = 0
        for _ in range(2):
            assert all(map(torch.equal, expected, step(model)))
            assert not world.num_second_runs

    (warning,) = warnings_in(caplog)
    assert "model.layers." in warning
    assert "no layer runs again" in warning
    assert "\n" not in warning


def test_a_tensor_that_cannot_be_rebuilt_is_rebuilt_no_more(caplog):
    model = tiny_model("gpt2")
    expected = step(model)
    weight = model.transformer.h[1].ln_2.weight

    with caplog.at_level(logging.WARNING):
        config = replace(EVERYTHING, recompute_modules=["mlp_norm", "mlp_act"])
        with attach(model, config) as offloader:
            assert all(map(torch.equal, expected, step(model)))
            assert offloader.metrics()["recomputed_bytes"]
            loss = model(**tiny_batch(), use_cache=False).loss
            with torch.no_grad():
                weight.add_(0.0)
            with pytest.raises((SavedTensorModifiedError, RuntimeError)):
                loss.backward()
            assert all(map(torch.equal, expected, step(model)))
            assert not offloader.metrics()["recomputed_bytes"]

    (warning,) = warnings_in(caplog)
    assert "transformer.h.1" in warning


@pytest.mark.parametrize("way", ["each layer", "tiles"])
def test_memory_that_runs_out_in_a_second_run_keeps_second_runs(way, caplog):
    """They are what saves memory."""
    model = tiny_model("llama")
    world = World(model.model.layers[0].mlp, runs_out_of_memory)

    with attach(model, replace(EVERYTHING, **WAYS[way])):
        expected = step(model)
        world.is_gone = True
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        world.is_gone, world.num_second_runs = False, 0
        assert all(map(torch.equal, expected, step(model)))
        assert world.num_second_runs

    assert not warnings_in(caplog)


@pytest.mark.parametrize("way", ["two layers, nested", "tiles"])
def test_an_error_of_a_second_run_passes_through_run_micro_batch(way):
    model = tiny_model("llama")
    expected = step(model)
    world = World(model.model.layers[1].mlp, raises)
    world.is_gone = True

    def micro_batch() -> None:
        model.zero_grad()
        model(**tiny_batch(), use_cache=False).loss.backward()

    with attach(model, replace(EVERYTHING, **WAYS[way])) as ours:
        with pytest.raises(WorldError):
            ours.run_micro_batch(micro_batch, writes_only_this_model=True)
        ours.run_micro_batch(micro_batch, writes_only_this_model=True)  # each layer runs once
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, expected, found))


def test_an_error_of_a_first_run_keeps_second_runs():
    model = tiny_model("llama")
    world = World(model.model.layers[1].mlp, raises)

    def fail(*_: Any) -> None:
        raise WorldError

    with attach(model, replace(EVERYTHING, checkpoint_every=1)):
        handle = model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(WorldError):
            step(model)
        handle.remove()
        step(model)
        assert world.num_second_runs
