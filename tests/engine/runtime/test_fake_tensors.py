"""The engine runs unchanged on fake tensors: that is how memory is estimated without a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import SavedTensorModifiedError
from tests.helpers import (
    EVERY_LAYER,
    EVERYTHING,
    MAIN,
    FunctionLayer,
    Stack,
    autocasting,
    enable_checkpointing,
    tiny_batch,
    tiny_model,
)

COUNTED = ("would_hold_bytes", "offloaded_bytes", "reloaded_bytes", "held_bytes", "num_slots")


def figures(
    model_type: str,
    config: PyAOConfig,
    *,
    autocast: torch.dtype | None = None,
    prepare: Callable[[torch.nn.Module], None] = lambda model: None,
) -> dict[str, float]:
    # Built anew: what a model makes of its configuration may differ from a copy's.
    model = tiny_model(model_type, attention="eager")
    prepare(model)
    with attach(model, config) as offloader:
        for _ in range(2):
            with autocasting(autocast):
                loss = model(**tiny_batch(), use_cache=False).loss
            loss.backward()
        assert offloader.host_pool.settle() == 0
        metrics = offloader.metrics()
    return {name: metrics[name] for name in COUNTED} | {
        name: value for name, value in metrics.items() if name.startswith("kept_bytes/")
    }


@pytest.mark.thorough
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("model_type", MAIN)
@pytest.mark.parametrize("config", [EVERYTHING, replace(EVERY_LAYER, window=4096)], ids=["", "4k"])
def test_figures_are_those_of_real_tensors(model_type: str, config: PyAOConfig) -> None:
    with FakeTensorMode():
        model = tiny_model(model_type, attention="eager")
        try:
            model(**tiny_batch(), use_cache=False)
        except DataDependentOutputException:
            pytest.skip(f"this release's {model_type} reads values in its forward")
    expected = figures(model_type, config)
    with FakeTensorMode():
        assert figures(model_type, config) == expected
    assert expected["offloaded_bytes"] == expected["reloaded_bytes"] > 0


@pytest.mark.thorough
def test_autocast_and_checkpointing() -> None:
    def checkpoint(model: torch.nn.Module) -> None:
        enable_checkpointing(model, use_reentrant=False)  # type: ignore[arg-type]

    for options in ({"autocast": torch.bfloat16}, {"prepare": checkpoint}):
        expected = figures("llama", EVERYTHING, **options)
        with FakeTensorMode():
            assert figures("llama", EVERYTHING, **options) == expected, options


def test_what_comes_back_is_fake_and_nothing_was_allocated() -> None:
    seen: list[torch.Tensor] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            seen.extend(ctx.saved_tensors)
            return gradient, None

    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        # 8 TiB: no machine that runs this test could hold it.
        return Probe.apply(x * layer.weight, torch.empty(2**40, 2).t())  # type: ignore[no-any-return]

    with FakeTensorMode():
        model = Stack(function)
        with attach(model, replace(EVERY_LAYER, host_memory_gib=2.0**14)) as offloader:
            model(torch.randn(4, 4)).sum().backward()
            assert offloader.metrics()["offloaded_bytes"] > 2**43
    assert type(seen[0]) is FakeTensor
    assert seen[0].shape == (2, 2**40)
    assert seen[0].stride() == (1, 2)


def test_a_change_in_place_raises() -> None:
    def function(layer: FunctionLayer, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone()
        product = hidden @ layer.weight
        hidden.add_(1)
        return product

    for config in (EVERY_LAYER, EVERYTHING):
        with FakeTensorMode():
            model = Stack(function)
            with attach(model, config):
                loss = model(torch.randn(4, 4, requires_grad=True)).sum()
                with pytest.raises(SavedTensorModifiedError, match=r"layers\.0"):
                    loss.backward()
