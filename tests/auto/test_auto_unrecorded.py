"""Policy auto where the step cannot be recorded: nothing is moved if all fits, and the cause named."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from tests.helpers import assert_same_tensors, gradients_of, tiny_batch, tiny_model

Call = Callable[..., Any]


def config(gib: float, **settings: Any) -> PyAOConfig:
    return PyAOConfig(
        min_bytes=0, host_memory_gib=0.1, device_memory_gib=gib, profile_steps=2, **settings
    )


class Packed(nn.Parameter):
    """A weight of a class that fake tensors do not know, as of a library for quantization."""

    def __deepcopy__(self, memo: Any) -> Packed:
        return self


Packed.__module__ = "quantizer.weights"


class LooksAtValues(nn.Module):
    """Its forward asks for a value."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        if batch["input_ids"].float().mean().item() < 0:
            raise ValueError
        return self.model(**batch)


def plain() -> tuple[nn.Module, Call, str]:
    model = LooksAtValues(tiny_model("llama"))
    return model, model, "no values"


def packed() -> tuple[nn.Module, Call, str]:
    model: Any = tiny_model("llama")
    own = model.model.layers[1].mlp.up_proj
    own.weight = Packed(own.weight.detach(), requires_grad=False)
    return model, model, "up_proj.weight' is a Packed of quantizer"


def compiled(how: str) -> tuple[nn.Module, Call, str]:
    torch._dynamo.reset()
    model: Any = tiny_model("llama")
    if how == "wrapped":
        return model, torch.compile(model, backend="eager"), "compiled as a whole"
    if how == "in place":
        model.compile(backend="eager")
        return model, model, "compiled as a whole"
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    return model, model, "a part of a layer is compiled, not layer by layer"


CASES: dict[str, Callable[[], tuple[nn.Module, Call, str]]] = {
    "values": plain,
    "packed weights": packed,
    "compiled": lambda: compiled("wrapped"),
    "compiled in place": lambda: compiled("in place"),
    "compiled parts of layers": lambda: compiled("parts"),
}


def step(model: nn.Module, call: Call, times: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    batch = {name: torch.cat([value] * times) for name, value in tiny_batch(0).items()}
    loss = call(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if m.startswith("policy 'auto'")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=3)
def test_it_offloads_nothing_where_everything_fits(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, call, cause = CASES[name]()
    reference = copy.deepcopy(model) if name == "values" else None
    offloader: Offloader
    with attach(model, config(1000.0)) as offloader:  # type: ignore[arg-type]
        for _ in range(5):
            found = step(model, call)
            if reference is not None:
                assert_same_tensors(found, step(reference, reference), name)
        assert offloader.engine.rests
        assert offloader.metrics()["offloaded_bytes"] == 0
        (line,) = lines(caplog)
        assert "it offloads nothing, since everything fits" in line
        assert cause in line


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=5)
def test_it_goes_on_and_says_why_where_it_may_not_fit(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, call, cause = CASES[name]()
    with attach(model, config(1e-5)) as offloader:  # type: ignore[arg-type]
        for _ in range(4):
            step(model, call)
        assert offloader.metrics()["offloaded_bytes"] > 0
        (line,) = lines(caplog)
        assert line.startswith("policy 'auto' goes on offloading everything")
        assert cause in line


def test_larger_batches_are_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, call, _ = plain()
    with attach(model, config(1.5e-3)) as offloader:
        for _ in range(4):
            step(model, call)
        assert offloader.engine.rests
        step(model, call, times=40)
        assert not offloader.engine.rests
        for _ in range(3):
            step(model, call, times=40)
        assert not offloader.engine.rests, "it does not fit"
    assert "goes on offloading everything" in lines(caplog)[-1]


def test_what_was_kept_is_followed_again_where_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "plan.json"
    for gib, is_followed in ((1.0, False), (1.0, True), (1e-5, False)):
        model, call, _ = plain()
        with attach(model, config(gib, plan=str(path))) as offloader:
            assert offloader.engine.rests is is_followed
            for _ in range(3):
                step(model, call)
            assert offloader.engine.rests is (gib == 1.0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["values", "compiled parts of layers"])
def test_a_part_is_kept_where_not_all_fits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As much as the limit allows, from the last layer backwards; bits stay."""
    caplog.set_level(logging.INFO)
    model, _, cause = CASES[name]()
    reference = CASES[name]()[0]
    with attach(model, config(1e-5)) as offloader:
        for _ in range(4):
            step(model, model)
        moved_bytes = offloader.metrics()["offloaded_bytes"]
    with attach(model, config(1000.0)) as offloader:
        for _ in range(4):
            step(model, model)
        assert offloader.plan is not None
        bound = offloader.plan.facts.kept_bound_bytes
    model.zero_grad()
    assert bound is not None
    kept: list[float] = []
    for share in (0.25, 0.5, 0.75, 0.95):
        limit_gib = (bound - (1 - share) * moved_bytes) / 2**30
        caplog.clear()
        with attach(model, config(limit_gib)) as offloader:
            for _ in range(4):
                assert_same_tensors(step(model, model), step(reference, reference), str(share))
            kept.append(moved_bytes - offloader.metrics()["offloaded_bytes"])
        (line,) = lines(caplog)
        assert "tensors kept" in line
        assert cause in line
    assert kept == sorted(kept)
    for share, found in zip((0.25, 0.5, 0.75, 0.95), kept, strict=True):
        assert 0.6 * share * moved_bytes < found <= share * moved_bytes


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "budget"), [("parts", 1.0), ("parts", 0.5), ("whole", 1.0), ("whole", 0.5)]
)
@pytest.mark.sampled(every=4)
def test_predicted_bytes_of_compiled_code_are_the_moved_ones(how: str, budget: float) -> None:
    """What the compiler saves is planned, not what the eager model would save."""

    def build() -> Any:
        torch._dynamo.reset()
        model: Any = tiny_model("llama")
        with torch._functorch.config.patch(activation_memory_budget=budget):
            for part in [each.mlp for each in model.model.layers] if how == "parts" else [model]:
                part.compile(backend="aot_eager_decomp_partition")
            expected.append(step(model, model))  # compiled here, with this budget
        return model

    expected: list[dict[str, Tensor]] = []
    moved: list[float] = []
    bound = 0.0
    for gib in (1e-5, 1000.0, None):
        model = build()
        limit_gib = (bound - 0.5 * moved[0]) / 2**30 if gib is None else gib
        with attach(model, config(limit_gib)) as offloader:
            for _ in range(4):
                assert_same_tensors(step(model, model), expected[0], f"{budget}, {limit_gib}")
            moved.append(offloader.metrics()["offloaded_bytes"])
            plan = offloader.plan
        if plan is not None and plan.facts.kept_bound_bytes is not None:
            bound = plan.facts.kept_bound_bytes
    assert plan is not None
    last = len(model.model.layers) - 1  # is kept in any case
    kept_bytes = sum(
        (slot.nbytes or 0) * len([layer for layer in slot.layers or () if layer != last])
        for slot in plan.slots
    )
    assert 0 < kept_bytes < moved[0]
    assert moved[0] - kept_bytes == moved[2]
    assert moved[1] == 0
