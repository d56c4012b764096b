"""Who watches an engine hears of all that it does, and can draw a step from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.runtime.observer import OVERHEADS, Observer
from hf_pyao.engine.runtime.timeline import StepTimeline
from hf_pyao.plan.hardware.speeds import DeviceModel, LinkModel
from tests.helpers import EVERY_LAYER, EVERYTHING, tiny_batch, tiny_model
from tests.helpers.simulation.device import SimulatedDevice
from tests.helpers.simulation.transport import SimulatedTransport


class Notes(Observer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, str, str, bool]] = []
        self.slots: list[tuple[Any, str | None, Any]] = []
        self.copies: list[tuple[str, Any, int]] = []

    def on_module(self, layer: str, path: str, phase: str, *, is_start: bool) -> None:
        self.modules.append((layer, path, phase, is_start))

    def on_slot(self, slot: Any, stays: str | None, decision: Any) -> None:
        self.slots.append((slot, stays, decision))

    def on_copy(self, direction: str, label: object, nbytes: int, ticket: Any) -> None:
        self.copies.append((direction, label, nbytes))


@pytest.mark.parametrize("recompute", [(), ("pointwise",)], ids=["", "recompute"])
def test_slots_copies_and_modules_are_told(recompute: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    notes = Notes()
    with attach(model, replace(EVERYTHING, recompute_modules=recompute)) as offloader:
        offloader.engine.observe(notes)
        model(**tiny_batch(), use_cache=False).loss.backward()
        metrics = offloader.metrics()
        names = offloader.layer_names
    moved = {slot for _, slot, _ in notes.copies}
    assert moved <= {slot for slot, _, _ in notes.slots}
    assert (
        sum(n for direction, _, n in notes.copies if direction == "offload")
        == (metrics["offloaded_bytes"])
    )
    assert sum(n for _, _, n in notes.copies) == metrics["link_bytes"]
    assert len({slot for slot, _, _ in notes.slots}) == len(notes.slots), "each is told once"
    for phase, order in (("forward", names), ("backward", names[::-1])):
        starts = [
            (layer, path) for layer, path, p, is_start in notes.modules if p == phase and is_start
        ]
        assert [layer for layer, path in starts if not path] == list(order)
        assert {path for layer, path in starts if layer == names[0]} >= {"mlp", "self_attn.q_proj"}
        ends = [
            (layer, path)
            for layer, path, p, is_start in notes.modules
            if p == phase and not is_start
        ]
        assert set(starts) == set(ends) or phase == "backward"


def test_gradients_are_the_same_where_someone_listens() -> None:
    plain, model = tiny_model("gpt2"), tiny_model("gpt2")
    plain(**tiny_batch()).loss.backward()
    config = replace(EVERY_LAYER, codec="identity", recompute_modules=("pointwise",))
    with attach(model, config) as offloader:
        offloader.engine.observe(StepTimeline(offloader.transport, offloader.device))
        model(**tiny_batch()).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def timeline_of(config: PyAOConfig) -> tuple[StepTimeline, dict[str, float]]:
    """Run a step on a virtual device and link; return what was seen, and the metrics."""
    model = tiny_model("llama")
    transport = SimulatedTransport(0, link=LinkModel(d2h_gib_per_s=0.5, h2d_gib_per_s=0.5))
    assert transport.link is not None
    speeds = DeviceModel(tflop_per_s=0.01, memory_gib_per_s=1.0, launch_us=1.0)
    with attach(model, config, transport=transport) as offloader:
        timeline = StepTimeline(transport, offloader.device)
        offloader.engine.observe(timeline)
        with SimulatedDevice(speeds, transport.link, offloader.host_pool):
            model(**tiny_batch(), use_cache=False).loss.backward()
        transport.finish()
        return timeline, offloader.metrics()


@pytest.mark.thorough
def test_each_part_of_the_overhead_is_timed() -> None:
    nothing, _ = timeline_of(EVERY_LAYER)
    assert nothing.overheads_ms() == {f"{what}_ms": 0.0 for what in OVERHEADS}
    encoded, _ = timeline_of(replace(EVERY_LAYER, codec="int8"))
    found = encoded.overheads_ms()
    assert found["encode_ms"] > 0
    assert found["decode_ms"] > 0
    assert found["trace_ms"] == found["restore_ms"] == found["recompute_ms"] == 0
    rebuilt, _ = timeline_of(replace(EVERY_LAYER, recompute_modules=("mlp",), window=0))
    found = rebuilt.overheads_ms()
    assert found["trace_ms"] > 0
    assert found["restore_ms"] > 0, "nothing comes back ahead: sources are waited for"
    assert found["recompute_ms"] > 0
    assert found["encode_ms"] == found["decode_ms"] == 0


def test_an_observer_that_raises_loses_no_copy() -> None:
    class Failing(Observer):
        def on_copy(self, direction: str, label: object, nbytes: int, ticket: object) -> None:
            raise ValueError("no")

    model = tiny_model("llama")
    transport = SimulatedTransport(1)
    config = replace(EVERYTHING, window=2**20)
    with attach(model, config, transport=transport) as offloader:
        offloader.engine.observe(Failing())
        with pytest.raises(ValueError, match="no"):
            model(**tiny_batch(), use_cache=False).loss.backward()
        offloader.engine.observe(None)
        for _ in range(3):
            model(**tiny_batch(), use_cache=False).loss.backward()
        assert offloader.host_pool.settle() == 0
    assert not transport.violations
