"""Writes a trace out as a small graph of plain values."""

from __future__ import annotations

from typing import Any

from hf_pyao.engine.recompute.trace_values import TensorSource, Value
from hf_pyao.engine.recompute.tracing import Trace

SCHEMA_VERSION = 1
"""Version of what :func:`graph_of` returns."""


def graph_of(trace: Trace) -> dict[str, Any]:
    """Return a traced layer call as a small graph of plain values, in the order of forward.

    ``operations`` name the values that they read and make by position in ``values``; a value's
    ``state`` says what becomes of it until backward: ``parameter``, ``constant``, ``stored``
    (kept or offloaded), ``recomputed`` (dropped, and saved by autograd), ``replayed`` (on the
    way to one that is recomputed) or ``unused``; ``slot`` is the name of the slot that it is
    saved or stored under, if there is one.
    """
    numbers: dict[Value, int] = {}
    operations = []
    for operation in trace.operations:
        outputs = [value for _, ref in operation.outputs if (value := ref()) is not None]
        for value in (*(ref.value for ref in operation.refs), *outputs):
            numbers.setdefault(value, len(numbers))
        operations.append(
            {
                "name": operation.rule.name,
                "path": operation.path,
                "kind": operation.rule.kind.value,
                "is_random": operation.rule.is_random,
                "may_replay": trace.may_replay(operation),
                "inputs": [numbers[ref.value] for ref in operation.refs],
                "outputs": [numbers[value] for value in outputs],
            }
        )
    for value in trace.values.values():
        numbers.setdefault(value, len(numbers))
    values = [
        {"nbytes": value.nbytes, "state": _state_of(value), "slot": _slot_of(value)}
        for value in numbers
    ]
    return {"schema_version": SCHEMA_VERSION, "operations": operations, "values": values}


def _slot_of(value: Value) -> str | None:
    dropped = None if value.slot is None else value.slot()
    slot = getattr(value.source if dropped is None else dropped, "slot", None)
    return None if slot is None else str(slot.name)


def _state_of(value: Value) -> str:
    """Say what becomes of it until backward."""
    if type(value.source) is TensorSource:
        return "parameter" if value.source.is_parameter else "constant"
    if value.source is not None:
        return "stored"
    if value.slot is not None:
        return "recomputed"
    return "replayed" if value.is_planned else "unused"
