"""A predicted step as a memory snapshot, for pytorch.org/memory_viz.

The format is that of ``torch.cuda.memory._snapshot``. No address is used twice: which blocks an
allocator would use again is not in it.
"""

from __future__ import annotations

import pickle
from typing import Any

from hf_pyao.plan.documents.step import OUTSIDE as NO_LAYER
from hf_pyao.plan.step.prediction import FREED, MemoryKey, Prediction
from hf_pyao.plan.step.step_program import OUTSIDE, StepProgram

ALIGNMENT = 512
"""Addresses are multiples of it, as the caching allocator's."""


def memory_snapshot(program: StepProgram, prediction: Prediction) -> bytes:
    """Return a pickle of what is on the device over a step.

    What is there all the time, such as weights, is a segment. All else has the module and the
    operation that make it in place of a stack.

    Args:
        program: the step.
        prediction: of it.
    """
    first = _aligned(max(program.resident_bytes, 1))
    address, events = first, []
    live: dict[MemoryKey, dict[str, Any]] = {}
    for key, size in prediction.memory:
        if size == FREED:
            there = live.pop(key)
            events += [{**there, "action": f"free_{when}"} for when in ("requested", "completed")]
            continue
        live[key] = {**_of(address, size), "frames": _frames(program, key)}
        events.append({**live[key], "action": "alloc"})
        address += _aligned(size)
    weights = {**_of(0, program.resident_bytes), "frames": [_frame("weights", "tensor")]}
    segments = [_segment(each) for each in (weights, *live.values())]  # as the step ends
    return pickle.dumps({"segments": segments, "device_traces": [events]})


def _of(address: int, size: int) -> dict[str, Any]:
    return {"addr": address, "size": size, "stream": 0, "time_us": 0}


def _segment(there: dict[str, Any]) -> dict[str, Any]:
    """Return what has one tensor."""
    size = _aligned(there["size"])
    place = {"address": there["addr"], "requested_size": there["size"]}
    block = {**place, "size": size, "state": "active_allocated", "frames": there["frames"]}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), size)
    own = {"device": 0, "stream": 0, "segment_type": "large"}
    return {**own, **place, **sizes, "blocks": [block]}


def _frames(program: StepProgram, key: MemoryKey) -> list[dict[str, Any]]:
    """Return what makes something, innermost first."""
    if isinstance(key, tuple):
        return [_frame(key[0], f"{key[0]} {key[1]}")]
    birth = program.buffers[key].birth
    frames = [_frame(program.name_of(key), "tensor")]
    if 0 <= birth < program.num_operations:
        operation, segment = program.operations[birth], program.segment_of(birth)
        where = NO_LAYER if segment.layer == OUTSIDE else program.layer_names[segment.layer]
        frames += [_frame(operation.name, operation.path), _frame(segment.phase, where)]
    return frames


def _frame(name: str, filename: str) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": 0}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
