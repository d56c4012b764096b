"""``RecordedStep``: a recorded step of as few layers as will do, also as a document.

In a document each operation, buffer and slot is one line of text, a JSON list of its fields in the
order of its class: a step has thousands.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from hf_pyao.plan.documents.schema import ReportError
from hf_pyao.plan.hardware.kernel_settings import KernelSettings
from hf_pyao.plan.hardware.kernel_workspaces import workspace_of
from hf_pyao.plan.step.layer_graph import GraphOperation, GraphValue, LayerGraph
from hf_pyao.plan.step.step_program import (
    OUTSIDE,
    READ_WHOLE,
    Buffer,
    Operation,
    Pack,
    Resident,
    Segment,
    SlotUse,
    StepProgram,
)
from hf_pyao.plan.step.stretch import NUM_RECORDED, stretch
from hf_pyao.text import echo

Row = TypeVar("Row", bound=NamedTuple)

MOST_BYTES = 2**50
"""More than any step holds; sums of such numbers are still exact."""

_TABLES: Mapping[str, Any] = {
    "operations": Operation,
    "buffers": Buffer,
    "slots": SlotUse,
    "segments": Segment,
    "packs": Pack,
    "residents": Resident,
}


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step: of as few layers as will do."""

    program: StepProgram
    """Of the layers that were run."""
    layer_names: tuple[str, ...]
    """Qualified names of all layers of the model."""
    added_bytes: int
    """Bytes of the layers that were not run."""

    def whole(self) -> StepProgram:
        """Return the step of the whole model."""
        if self.layer_names == self.program.layer_names:
            return self.program
        return stretch(self.program, self.layer_names, self.added_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        program, graph = self.program, self.program.graph
        document: dict[str, Any] = {
            "layer_names": list(self.layer_names),
            "recorded_layer_names": list(program.layer_names),
            "added_bytes": self.added_bytes,
            "resident_bytes": program.resident_bytes,
            "labels": {str(number): name for number, name in program.labels.items()},
            "num_tiles": program.num_tiles,
            "num_tiled_tokens": program.num_tiled_tokens,
            "kernels": list(program.kernels),
        }
        for name in _TABLES:
            document[name] = _lines(getattr(program, name))
        if graph is not None:
            document["graph"] = {
                "layer": graph.layer,
                "operations": _lines(graph.operations),
                "values": _lines(graph.values),
                "unseen": list(graph.unseen),
            }
        return document

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the program") -> RecordedStep:
        """Read plain values.

        Raises:
            ReportError: something is missing, of another type, or does not hang together.
        """
        try:
            names = tuple(_texts(values["recorded_layer_names"]))
            graph = values.get("graph")
            tables: dict[str, Any] = {
                name: _rows(row, _lines_of(name, values)) for name, row in _TABLES.items()
            }
            program = StepProgram(
                **tables,
                resident_bytes=_count(values["resident_bytes"]),
                layer_names=names,
                labels={int(number): str(name) for number, name in values["labels"].items()},
                graph=None if graph is None else _graph(graph),
                num_tiles=_count(values.get("num_tiles", 0)),
                num_tiled_tokens=_count(values.get("num_tiled_tokens", 0)),
                # Older ones also say whether collectives run over gloo.
                kernels=_row(
                    KernelSettings, values.get("kernels", [])[: len(KernelSettings._fields)]
                ),
            )
            _check(program)
            step = cls(program, tuple(_texts(values["layer_names"])), _count(values["added_bytes"]))
            if step.layer_names != names and (
                len(names) != NUM_RECORDED or len(step.layer_names) < NUM_RECORDED
            ):
                raise ValueError(f"{len(names)} recorded layers for {len(step.layer_names)}")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ReportError(
                f"{where}: the recorded step in it is damaged ({echo(str(error))}). Make the "
                "profile anew.",
                key="file-damaged",
            ) from error
        return step


def _lines(rows: Iterable[Any]) -> list[str]:
    return [json.dumps(list(row), separators=(",", ":")) for row in rows]


def _lines_of(name: str, values: Mapping[str, Any]) -> Any:
    """Return a table's lines; residents are not in steps that earlier versions recorded."""
    return values.get(name, []) if name == "residents" else values[name]


def _rows(kind: type[Row], lines: Any) -> tuple[Row, ...]:
    found = [json.loads(line) for line in _texts(lines)]
    if kind is Resident:  # older ones also say whether they were uploaded in another dtype
        found = [each[: len(Resident._fields)] for each in found]
    return tuple(_row(kind, each) for each in found)


def _row(kind: type[Row], found: Any) -> Row:
    hints = _hints(kind)
    least = len(hints) - len(getattr(kind, "_field_defaults", ()))
    if not isinstance(found, list) or not least <= len(found) <= len(hints):
        raise ValueError(f"{kind.__name__} {str(found)[:80]}")
    cells = [_cell(hint, value) for hint, value in zip(hints, found, strict=False)]
    return cast(Row, cast(Any, kind)(*cells))


@cache
def _hints(kind: type) -> tuple[Any, ...]:
    return tuple(typing.get_type_hints(kind).values())


def _cell(hint: Any, value: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_cell(get_args(hint)[0], each) for each in value)
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if hasattr(hint, "_fields"):
        return _row(hint, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{str(value)[:40]!r} is no {hint.__name__}")
    return value


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("expected a list of texts")
    return values


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is no number of bytes")
    return value


def _graph(values: Mapping[str, Any]) -> LayerGraph:
    graph = LayerGraph(
        _count(values["layer"]),
        _rows(GraphOperation, values["operations"]),
        _rows(GraphValue, values["values"]),
        tuple(_count(value) for value in values.get("unseen", ())),
    )
    _within(graph.unseen, 0, len(graph.values))
    for operation in graph.operations:
        _within((*operation.reads, *operation.makes), 0, len(graph.values))
    return graph


def _check(program: StepProgram) -> None:
    """Check that numbers point at what is there."""
    end, num_buffers = program.num_operations, len(program.buffers)
    for operation in program.operations:
        if not (operation.flops >= 0 and operation.traffic_bytes >= 0 and operation.num_runs >= 0):
            raise ValueError(f"costs of {operation.name}")
        _count(operation.workspace_bytes)
        if operation.reads is not None:
            _within((operation.reads.experts, operation.reads.first), 0, MOST_BYTES)
            _within((operation.reads.last,), operation.reads.first, MOST_BYTES)
        if operation.workspace_bytes != workspace_of(operation.call, program.kernels):
            raise ValueError(f"workspace of {operation.name}")
    for buffer in program.buffers:
        _within((buffer.birth,), 0, end)
        _within((buffer.death,), buffer.birth, end + 1)
        _count(buffer.nbytes)
    for slot in program.slots:
        _within((slot.layer,), 0, program.num_layers)
        _within((slot.source, slot.reloaded), -1, num_buffers)
        _within((slot.packed_at, slot.left_at), 0, end + 1)
        _within((slot.unpacked_at, *slot.asked_again), -1, end + 1)
        _within((slot.nbytes, slot.link_bytes, slot.row_values), 0, MOST_BYTES)
    reached = 0
    for segment in program.segments:
        _within((segment.layer,), OUTSIDE, program.num_layers)
        if segment.start != reached or segment.end < reached:
            raise ValueError("segments have gaps")
        reached = segment.end
    if reached != end:
        raise ValueError("segments end early")
    _within((each.layer for each in program.residents), OUTSIDE, program.num_layers)
    for resident in program.residents:
        _count(resident.nbytes)
        _within((resident.num_names,), 1, MOST_BYTES)
        _within((resident.experts,), 0, MOST_BYTES)
        _within((resident.end,), 0, READ_WHOLE + 1)
        _within((resident.num_experts,), 1 if resident.experts else 0, MOST_BYTES)
    _within(program.labels, 0, num_buffers)
    if program.graph is not None:
        _within((each.number for each in program.graph.operations), 0, end)
        _within((each.buffer for each in program.graph.values), -1, num_buffers)


def _within(numbers: Iterable[int], least: int, end: int) -> None:
    for number in numbers:
        if not least <= number < end:
            raise ValueError(f"{number} is not within {least} to {end - 1}")
