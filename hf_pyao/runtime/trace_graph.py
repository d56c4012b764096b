"""Writes a trace out as a small graph of plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_pyao.runtime.values import Value

if TYPE_CHECKING:
    from hf_pyao.runtime.tracing import Trace

SCHEMA_VERSION = 1
"""Version of what :meth:`Trace.to_dict` returns."""


def graph_of(trace: Trace) -> dict[str, Any]:
    """Return *trace* as :meth:`~hf_pyao.runtime.tracing.Trace.to_dict` says."""
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
    values = [{"nbytes": value.nbytes, "state": value.state} for value in numbers]
    return {"schema_version": SCHEMA_VERSION, "operations": operations, "values": values}
