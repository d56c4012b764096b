"""Policies: what they are asked, under which names, and when another takes over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.policy import (
    Keep,
    KeepLastLayers,
    LayerRun,
    Offload,
    Policy,
    Recompute,
    RecomputeSelected,
    Situation,
)
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.policies.budget import OffloadBudget
from hf_pyao.plan.policies.plan_policy import PlanPolicy
from tests.helpers import EVERYTHING, tiny_batch, tiny_model

OFFLOAD = Offload()


class Lists(Policy):
    """Lists what it is asked, and has all of it moved; or rebuilt, in traced layers."""

    name = "lists"

    def __init__(self, recompute: bool = False) -> None:
        self.asked: list[tuple[Slot, Situation]] = []
        self.recompute = recompute

    def decide(self, slot: Slot, situation: Situation) -> Any:
        self.asked.append((slot, situation))
        return Recompute(OFFLOAD) if self.recompute else OFFLOAD

    def products_to_replay(self, run: LayerRun) -> frozenset[str] | None:
        return frozenset() if self.recompute else None


def storages_saved_in(model: nn.Module, layers: tuple[str, ...]) -> Counter[int]:
    """Count, by size, the distinct storages that autograd saves in *layers*; no engine is near."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    sizes: Counter[int] = Counter()
    seen: set[int] = set()
    alive: list[torch.Tensor] = []  # no address is used again
    inside: list[bool] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in weights | seen:
            seen.add(storage._cdata)
            alive.append(tensor.detach())
            sizes[storage.nbytes()] += 1
        return tensor

    handles = []
    for name in layers:
        layer = model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(lambda *_: inside.append(True)))
        handles.append(layer.register_forward_hook(lambda *_: inside.clear()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**tiny_batch(), use_cache=False)
    for handle in handles:
        handle.remove()
    return sizes


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama", "bart"])
def test_a_policy_sees_all_that_autograd_saves_in_layers(model_type: str, recompute: bool) -> None:
    model = tiny_model(model_type)
    policy = Lists(recompute)
    config = PyAOConfig(policy=policy, keep_last_layers=0, host_memory_gib=0.1)
    with attach(model, config) as offloader:
        layers = offloader.layer_names
        model(**tiny_batch(), use_cache=False).loss.backward()
    saved = Counter(slot.nbytes for slot, _ in policy.asked if not slot.is_anchor)
    expected = storages_saved_in(model, layers)
    anchors = Counter(slot.nbytes for slot, _ in policy.asked if slot.is_anchor)
    assert not saved - expected, "asked of what autograd does not save"
    assert not expected - saved - anchors, "not asked of what autograd saves"
    assert recompute or saved == expected
    if model_type == "llama":
        assert "shared by layers" in {situation.stays for _, situation in policy.asked}


# ---- another policy ----------------------------------------------------------------------------------


class KeepsAll(Policy):
    name = "keeps all"

    def decide(self, slot: Slot, situation: Situation) -> Keep:
        return Keep("kept by the test")


def test_a_policy_that_is_given_between_micro_batches_decides_from_the_next_on() -> None:
    model = tiny_model("gpt2")
    with attach(model, replace(EVERYTHING, report=None)) as offloader:
        model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
        offloader.engine.use(KeepsAll())
        assert "'keeps all'" in offloader.describe()
        assert "'keeps all'" in repr(offloader)
        model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] == 0
        assert offloader.metrics()["kept_bytes/kept by the test"] > 0
        offloader.engine.use(KeepLastLayers(Lists(), first_kept=1))
        model(**tiny_batch()).loss.backward()
        assert offloader.metrics()["offloaded_bytes"] > 0
        assert offloader.metrics()["kept_bytes/last layer"] > 0


def test_a_forward_that_has_begun_goes_on_with_the_policy_it_began_with() -> None:
    model = tiny_model("gpt2")
    plain = tiny_model("gpt2")
    plain(**tiny_batch()).loss.backward()
    with attach(model, replace(EVERYTHING, keep_last_layers=0)) as offloader:
        engine = offloader.engine
        model(**tiny_batch()).loss.backward()
        before = offloader.metrics()["offloaded_bytes"]
        model.zero_grad()
        handle = model.transformer.h[1].register_forward_pre_hook(lambda *_: engine.use(KeepsAll()))
        loss = model(**tiny_batch()).loss
        handle.remove()
        engine.use(Lists())  # its backward has not begun
        loss.backward()
        assert offloader.metrics()["offloaded_bytes"] == before
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_is_no_policy_is_refused() -> None:
    with (
        attach(tiny_model("opt"), EVERYTHING) as offloader,
        pytest.raises(ConfigError, match=r"policy is 'all'; expected a subclass of .*Policy"),
    ):
        offloader.engine.use("all")  # type: ignore[arg-type]


def test_only_what_says_that_it_is_static_is_not_asked_again() -> None:
    class Static(Lists):
        is_static = True

    for policy, times in ((Lists(), 3), (Static(), 1)):
        model = tiny_model("opt")
        with attach(model, PyAOConfig(policy=policy, host_memory_gib=0.1, keep_last_layers=0)):
            for _ in range(3):
                model(**tiny_batch()).loss.backward()
        counts = Counter(slot for slot, _ in policy.asked)
        assert set(counts.values()) == {times}, policy


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "llama"])
def test_equal_layers_save_under_equal_names(architecture: str) -> None:
    """What layers share is saved by the first alone, and moves no ordinal of the others."""

    class Listing(Policy):
        name = "listing"

        def __init__(self) -> None:
            self.names: dict[int, list[tuple[str, int]]] = {}
            self.shared: list[Slot] = []

        def decide(self, slot: Slot, situation: Situation) -> Any:
            if situation.stays is None:
                self.names.setdefault(slot.layer_index, []).append((slot.name, slot.nbytes))
            else:
                self.shared.append(slot)
            return Offload()

    model, policy = tiny_model(architecture), Listing()
    with attach(model, replace(EVERYTHING, policy=policy)):
        model(**tiny_batch(), use_cache=False).loss.backward()
    first, *others = policy.names.values()
    assert others
    assert all(names == first for names in others)
    if architecture == "llama":
        assert [slot.name for slot in policy.shared] == ["self_attn:shared0", "self_attn:shared1"]
        assert {slot.layer_index for slot in policy.shared} == {0}


# ---- objects that are no Policy, and policies around policies --------------------------------------


class Foreign:
    """Has what a policy has, and derives from nothing."""

    name = "foreign"

    def decide(self, slot: Slot, situation: Situation) -> Offload:
        return OFFLOAD


def test_an_object_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="Foreign.*expected a subclass of .*Policy"):
        attach(tiny_model("opt"), replace(EVERYTHING, policy=Foreign()))


def test_what_is_wrapped_around_a_policy_says_what_that_says() -> None:
    budget = OffloadBudget(0, max_tensors=1)
    wrapped = KeepLastLayers(RecomputeSelected(budget, {}, is_pointwise=True), first_kept=1)
    assert wrapped.innermost is budget
    assert (wrapped.is_static, wrapped.may_recompute, wrapped.rests) == (False, True, False)
    first, last = (Slot(f"layers.{i}", i, "mlp", 0, 8, torch.float32) for i in (0, 1))
    forward = wrapped.for_forward()
    for _ in range(3):  # what is only asked for uses nothing of the budget
        assert forward.would_decide(first, Situation()) == Recompute(OFFLOAD)
        assert forward.would_decide(last, Situation()) == Keep("last layer")
    kept = KeepLastLayers(budget, 1).for_forward()
    assert [kept.would_decide(first, Situation()) for _ in range(3)] == [OFFLOAD] * 3

    lossy = PlanPolicy(Plan(slots=[PlannedSlot(name="mlp:0", action="offload", codec="int8")]))
    both = KeepLastLayers(RecomputeSelected(lossy, {"layers.0": frozenset({"mlp"})}), 1)
    assert lossy.may_lose and both.may_lose
    assert both.innermost is lossy
