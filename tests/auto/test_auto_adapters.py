"""Policy auto with adapters: LoRA, DoRA, on NF4, several in turns, and a reference model beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.auto.offloader import Offloader
from hf_pyao.plan.documents.plan import KEEP
from tests.engine.weights.test_streaming import ring_of
from tests.helpers import tiny_batch, tiny_model
from tests.helpers.adapters import tiny_lora, with_adapters
from tests.helpers.quantised import quantise_

NUM_MEASURED, NUM_STEPS = 2, 8

AUTO = PyAOConfig(
    policy="auto",
    profile_steps=NUM_MEASURED,
    device_memory_gib=1e-9,  # nothing fits: the plan is the one with the least memory
    min_bytes=0,
    checkpoint_every=0,
    host_memory_gib=0.1,
)
STREAMED = PyAOConfig(policy="all", min_bytes=0, host_memory_gib=0.1, stream_weights=0)


def on_nf4() -> nn.Module:
    return with_adapters(quantise_(tiny_model("llama"), "nf4"))


def two_adapters() -> Any:
    from peft import LoraConfig

    model: Any = tiny_lora("llama")
    torch.manual_seed(8)
    second = LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    model.add_adapter("second", second)
    return model


def take_turns(model: Any, step: int) -> None:
    model.set_adapter(("default", "second")[step % 2])


def one_alone(model: Any, step: int) -> None:
    """All steps train the same adapters."""


def later_the_other(model: Any, step: int) -> None:
    model.set_adapter("second" if step >= NUM_STEPS // 2 else "default")


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "LoRA": (lambda: tiny_lora("llama"), one_alone),
    "DoRA": (lambda: tiny_lora("llama", adapters={"use_dora": True}), one_alone),
    "NF4": (on_nf4, one_alone),
    "in turns": (two_adapters, take_turns),
    "the other later": (two_adapters, later_the_other),
}


def trained(
    build: Callable[[], Any], before: Callable[[Any, int], None], config: PyAOConfig | None
) -> tuple[list[torch.Tensor], Offloader | None]:
    """Train some steps; return losses and the adapters, and what was attached."""
    model = build().train()
    offloader = None if config is None else attach(model, config)
    own: Any = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.SGD(own, lr=0.1)
    found = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        before(model, step)
        loss = model(**tiny_batch(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if offloader is not None:
        offloader.detach()
    return [*found, *(p.detach() for p in own)], offloader


def check(name: str) -> None:
    build, before = CASES[name]
    expected, _ = trained(build, before, None)
    found, offloader = trained(build, before, AUTO)
    assert len(found) == len(expected) > NUM_STEPS
    assert all(map(torch.equal, found, expected))
    assert offloader is not None
    assert offloader.plan is not None, "it plans, whatever is trained"
    assert any(slot.action != KEEP for slot in offloader.plan.slots)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=3)
def test_adapters_are_trained_as_without_us(name: str) -> None:
    check(name)


def distilled(models: tuple[Any, Any], step: int) -> torch.Tensor:
    """Train a policy for one step, towards a reference; return the loss."""
    policy, reference = models
    torch.manual_seed(step)
    batch = {**tiny_batch(), "use_cache": False}
    with torch.no_grad():
        target = reference(**batch).logits
    outputs = policy(**batch)
    loss: torch.Tensor = outputs.loss + (outputs.logits - target).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "planned", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["all", "auto"]
)
def test_a_reference_model_shares_host_memory_and_link(planned: bool) -> None:
    def models() -> tuple[Any, Any]:
        reference = tiny_lora("llama", num_hidden_layers=4)
        return tiny_lora("llama", num_hidden_layers=4).train(), reference.eval().requires_grad_(
            False
        )

    plain, ours = models(), models()
    config = dataclasses.replace(STREAMED, policy="auto" if planned else "all")
    config = dataclasses.replace(config, profile_steps=NUM_MEASURED, device_memory_gib=1e-9)
    with attach(ours[0], config) as one, attach(ours[1], STREAMED, link=one.link) as two:
        assert one.host_pool is two.host_pool
        for step in range(5):
            assert torch.equal(distilled(ours, step), distilled(plain, step))
        for left, right in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None)
            assert left.grad is None or torch.equal(left.grad, right.grad)
        assert ring_of(one).num_uploads > 0
        assert ring_of(two).num_uploads > 0
