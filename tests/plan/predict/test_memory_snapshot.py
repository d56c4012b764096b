"""A predicted step as a memory snapshot, as torch's own readers of snapshots read it."""

from __future__ import annotations

import pickle

import pytest
from torch.cuda import _memory_viz

from hf_pyao.plan.predict.memory_snapshot import memory_snapshot
from hf_pyao.plan.predict.predict import predict
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step

MODEL = (
    "gpt2:n_layer=3,n_head=2,n_embd=64,vocab_size=100,n_positions=48,bos_token_id=0,eos_token_id=0"
)


@pytest.mark.parametrize("offloads", [False, True])
def test_torch_reads_the_peak_from_it(offloads: bool) -> None:
    program = record_step(FakeTraining(config=config_of(parse_model(MODEL))), 2, 40)
    leaves = [offloads and slot.stays is None for slot in program.slots]
    predicted = predict(program, leaves, window_bytes=None)
    snapshot = pickle.loads(memory_snapshot(program, predicted))

    (trace,) = snapshot["device_traces"]
    live, most = {}, program.resident_bytes
    for event in trace:
        assert event.keys() >= {"action", "addr", "size", "stream", "frames", "time_us"}
        if event["action"] == "alloc":
            assert event["addr"] not in live and event["frames"]
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        most = max(most, program.resident_bytes + sum(live.values()))
    assert most == predicted.peak_bytes
    there = {s["address"]: s["blocks"][0]["requested_size"] for s in snapshot["segments"]}
    assert there == {0: program.resident_bytes, **live}
    names = {frame["name"] for event in trace for frame in event["frames"]}
    assert {"forward", "backward"} < names
    assert ("reloaded" in str(names)) == offloads

    words = _memory_viz.trace(snapshot)
    assert f"{len(trace)} entries" in words
    assert "cudaMalloc" not in words
    assert _memory_viz.segsum(snapshot).count("\n") > len(there)
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
