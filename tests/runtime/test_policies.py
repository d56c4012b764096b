"""Policies: what they are asked, under which names, and when another takes over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pyao import PyAOConfig, attach
from hf_pyao.errors import ConfigError
from hf_pyao.runtime.policy import Keep, KeepLastLayers, LayerRun, Offload, Recompute, Situation
from hf_pyao.runtime.slots import Slot
from tests.helpers import EVERYTHING, tiny_batch, tiny_model

OFFLOAD = Offload()


class Lists:
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


def test_names_are_stable_and_anchors_have_their_own() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    policy = Lists(recompute=True)
    with attach(model, PyAOConfig(policy=policy, keep_last_layers=0, host_memory_gib=0.1)) as o:
        per_step = []
        for _ in range(3):
            policy.asked.clear()
            model(**tiny_batch(), use_cache=False).loss.backward()
            per_step.append([slot for slot, _ in policy.asked])
        assert o.metrics()["recomputed_bytes"] > 0
    assert per_step[0] == per_step[1] == per_step[2]
    assert len(set(per_step[0])) == len(per_step[0]), "each is asked for once"
    anchors = [slot for slot in per_step[0] if slot.is_anchor]
    assert anchors
    assert all(":anchor" in slot.name for slot in anchors)
    middle = [slot.name for slot in per_step[0] if slot.layer_index == 1]
    assert middle == [slot.name for slot in per_step[0] if slot.layer_index == 2]


# ---- another policy ----------------------------------------------------------------------------------


class KeepsAll:
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
        pytest.raises(ConfigError, match=r"policy is 'all'; expected an object with `name`"),
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

    class Listing:
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
