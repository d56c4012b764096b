"""Ctrl-C at any line while weights are streamed, and detaching at any point."""

from __future__ import annotations

import gc
import random
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import HostPool
from tests.engine.runtime.test_interrupts import (
    Case,
    failures_at,
    first_and_last,
    interrupt,
    is_free,
    lines_of,
)
from tests.engine.weights.test_streaming import llama, loss_of, streamed
from tests.helpers import EVERY_LAYER, Stack, assert_same_tensors, autocasting, gradients_of
from tests.helpers.adapters import cast_base_
from tests.helpers.interrupts import Interrupter, Line

STREAMED = replace(EVERY_LAYER, stream_weights=0, window=2048)

CASES: dict[str, tuple[PyAOConfig, dict[str, Any]]] = {
    "bytes": (STREAMED, {}),
    "nothing offloaded": (replace(STREAMED, policy="off"), {}),
    "autocast": (STREAMED, {"autocast": torch.bfloat16}),
    "checkpointing": (STREAMED, {"is_checkpointed": True}),
    "segments": (replace(STREAMED, checkpoint_every=2), {}),
    "recompute": (replace(STREAMED, recompute_modules=("pointwise",)), {}),
}


class StreamedCase(Case):
    """The matrices are frozen; biases are trained."""

    def make_model(self) -> Stack:
        model = super().make_model()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
            if parameter.dim() > 1 and self.autocast is not None:
                parameter.data = parameter.detach().to(self.autocast)
        self.frozen = frozen(model)
        self.bits = bits(self.frozen)
        self.rings: list[Any] = []
        return model

    def run(self, model: Stack, engines: list[Any]) -> None:
        with attach(model, self.config, host_pool=self.pool) as offloader:
            engines.append(offloader.engine)
            assert offloader.weights is not None
            self.rings.append(offloader.weights.ring)
            self.step(model)

    def what_is_left(self, model: Stack, engines: list[Any]) -> list[str]:
        left = [*super().what_is_left(model, engines), *weights_left(model, self.frozen)]
        left += ["the ring's lock" for ring in self.rings if not is_free(ring._lock)]
        assert_same_tensors(bits(frozen(model)), self.bits, "frozen weights")
        return left


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def bits(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def weights_left(model: nn.Module, before: dict[str, nn.Parameter]) -> list[str]:
    """Say what of streaming is still on a detached *model*."""
    left = [
        f"a table of {path or 'the model'}"
        for path, module in model.named_modules()
        if type(module._parameters) is not dict
    ]
    left += [
        f"{path}.{key}"
        for path, module in model.named_modules()
        for key in vars(module)
        if key.startswith("_pyao") or key in ("_apply", "_ddp_params_and_buffers_to_ignore")
    ]
    after = frozen(model)
    left += [f"another {name}" for name, p in before.items() if after.get(name) is not p]
    return left


def interrupt_a_step(case: Case, at: int) -> None:
    """Interrupt the second step; the model stays attached, and the next step must be right."""
    model = case.make_model()
    expected = bits(frozen(model))
    with attach(model, case.config, host_pool=HostPool(2**20, pin=False)):
        case.step(model)
        with Interrupter(at):
            try:
                case.step(model)
            except KeyboardInterrupt:
                pass
        assert_same_tensors(case.step(model), case.expected, "the next step")
        assert_same_tensors(case.step(model), case.expected, "the step after it")
    assert_same_tensors(bits(frozen(model)), expected, "frozen weights")


def lines_of_a_step(case: Case) -> list[Line]:
    lines: list[Line] = []
    model = case.make_model()
    with attach(model, case.config, host_pool=HostPool(2**20, pin=False)):
        case.step(model)
        with Interrupter(note=lines.append):
            case.step(model)
    return lines


@pytest.fixture(autouse=True)
def _small(small_heap: None) -> None:
    gc.collect()


def of_streaming(lines: list[Line], known: AbstractSet[Line] = frozenset()) -> list[int]:
    """Return when the lines of streaming that are not *known* run first, and last."""
    files = ("weights", "ring_schedule")
    numbers = first_and_last(lines, set(known))
    return sorted(n for n in numbers if any(name in lines[n][0] for name in files))


@pytest.mark.parametrize("check", [interrupt, interrupt_a_step])
def test_an_interrupt_at_some_lines(check: Any) -> None:
    case = StreamedCase(*CASES["bytes"][:1])
    lines = lines_of(case) if check is interrupt else lines_of_a_step(case)
    numbers = random.Random(0).sample(of_streaming(lines), 25)
    assert failures_at(case, numbers, lines, check) == []


@pytest.mark.thorough
@pytest.mark.parametrize("check", [interrupt, interrupt_a_step])
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_at_every_line_of_streaming(name: str, check: Any) -> None:
    config, options = CASES[name]
    case = StreamedCase(config, **options)
    of_case = lines_of if check is interrupt else lines_of_a_step
    lines = of_case(case)
    known = set() if name == "bytes" else set(of_case(StreamedCase(*CASES["bytes"][:1])))
    numbers = set(of_streaming(lines, known))
    assert numbers or known
    numbers |= set(random.Random(1).sample(range(len(lines)), 60))
    assert failures_at(case, sorted(numbers), lines, check) == []


# ---- detaching at any point ----------------------------------------------------------------------


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("policy", ["all", "off"])
@pytest.mark.parametrize(
    "where", ["in a forward", "after a layer", "before backward", "in a backward", "twice"]
)
def test_detaching_at_any_point_leaves_right_gradients_and_the_parameters(
    where: str, policy: str, autocast: Any
) -> None:
    model, plain = llama(), llama()
    if autocast is not None:
        cast_base_(model, autocast)
        cast_base_(plain, autocast)
    with autocasting(autocast):
        loss_of(plain).backward()
    parameters = frozen(model)
    expected = bits(parameters)
    offloader = streamed(model, policy=policy)
    modules = dict(model.named_modules())
    layer = next(m for name, m in modules.items() if name.endswith("layers.2"))
    inner = next(m for name, m in modules.items() if name.endswith("layers.2.mlp"))

    def detach(*_: Any) -> None:
        offloader.detach()

    handles = []
    if where == "in a forward":
        handles.append(inner.register_forward_hook(detach))
    if where == "after a layer":
        handles.append(layer.register_forward_hook(detach))
    if where == "in a backward":
        handles.append(inner.register_full_backward_hook(detach))
    with autocasting(autocast):
        loss = loss_of(model)
    if where in ("before backward", "twice"):
        detach()
    loss.backward()
    detach()
    for handle in handles:
        handle.remove()
    assert not weights_left(model, parameters)
    assert_same_tensors(bits(frozen(model)), expected, "frozen weights")
    assert_same_tensors(gradients_of(model), gradients_of(plain), where)
