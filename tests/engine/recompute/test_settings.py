"""Operations run again as they ran in forward, whatever torch is set to by the time of backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.codecs.narrow import NarrowCodec
from hf_pyao.engine.recompute import replay
from hf_pyao.engine.rerun.settings import apply_settings, current_settings
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, gradients_of

RECOMPUTING = replace(EVERY_LAYER, recompute_modules=("pointwise", "*"))
CONFIGS: dict[str, PyAOConfig] = {
    "recompute": RECOMPUTING,
    "identity": EVERY_LAYER,
    "bitmask": replace(EVERY_LAYER, codec="bitmask"),
    "narrow": replace(EVERY_LAYER, codec=NarrowCodec()),
}


def depends_on_the_default(layer: Any, x: torch.Tensor) -> torch.Tensor:
    count = torch.arange(x.shape[-1])
    share = (count * 0.1 + 1).log()  # integers and numbers make the default dtype
    scale = torch.full((x.shape[-1],), 0.1)
    return ((x @ layer.weight).tanh() * share * scale).to(x.dtype).sigmoid()


def changes_it_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with default_dtype(torch.float64):
        hidden = depends_on_the_default(layer, x)
    return depends_on_the_default(layer, hidden)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradients(model: Stack, backward: torch.dtype) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 16).view(4, 4)).square().sum()
    with default_dtype(backward):
        loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("backward", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [depends_on_the_default, changes_it_inside])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_another_default_dtype(
    config: PyAOConfig, function: Callable[..., Any], backward: torch.dtype
) -> None:
    model = Stack(function, function)
    expected = gradients(copy.deepcopy(model), backward)
    with attach(model, config) as offloader:
        assert_same_tensors(gradients(model, backward), expected, "attached")
        assert config is not RECOMPUTING or offloader.metrics()["recomputed_bytes"] > 0
    assert torch.get_default_dtype() is torch.float32


def other_than(value: Any) -> Any:
    """Return another value of the same setting; the default dtype stays."""
    if isinstance(value, tuple):
        return tuple_like(value, not value[0])
    return {bool: lambda: not value, str: lambda: "medium", int: lambda: value + 1}.get(
        type(value), lambda: value
    )()


def test_settings_are_forwards_in_a_replay_and_then_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All settings differ between forward and backward; each operation sees forward's."""
    others = tuple(map(other_than, current_settings()))
    before = current_settings()
    seen: list[Any] = []

    def function(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ layer.weight).tanh().exp().sigmoid()

    run = replay._Run._run

    def note(*args: Any) -> None:
        seen.append((current_settings(), torch.is_grad_enabled()))
        run(*args)

    model = Stack(function)
    with attach(model, RECOMPUTING):
        loss = model(torch.ones(4, 4)).sum()
        monkeypatch.setattr(replay._Run, "_run", note)
        apply_settings(before, others)
        try:
            loss.backward()
            assert current_settings() == others
        finally:
            apply_settings(current_settings(), before)
    assert seen
    assert all(settings == before and not has_grad for settings, has_grad in seen)
    assert torch.is_grad_enabled()


def tuple_like(value: Any, part: bool) -> Any:
    return (part,) * len(value) if isinstance(value, tuple) else part
