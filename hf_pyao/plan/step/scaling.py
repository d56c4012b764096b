"""A step at other sizes than it was recorded at: every byte and FLOP as a polynomial of one size.

With the batch everything grows in proportion, but for what does not depend on it; with the length,
scores of attention grow with its square. So two recordings tell of every micro-batch, and three of
every length, as long as the step runs the same operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from math import ceil

from hf_pyao.errors import PyAOError
from hf_pyao.plan.hardware.kernel_workspaces import KernelCall, workspace_of
from hf_pyao.plan.step.layer_graph import LayerGraph
from hf_pyao.plan.step.step_program import Buffer, Operation, StepProgram


class OtherOperationsError(PyAOError, ValueError):
    """A step runs other operations at one size than at another."""

    key = "other-operations"


def interpolate(points: Sequence[tuple[int, StepProgram]]) -> Callable[[int], StepProgram]:
    """Return the program as a function of the size.

    Args:
        points: sizes and the programs recorded there; as many as the degree of growth plus one.
            Lengths in multiples of 64, as those that are asked for: kernels round them up.

    Returns:
        A function of the size. Bytes are rounded up, and are never below those of the smallest
        recording for sizes above it.

    Raises:
        OtherOperationsError: the programs do not run the same operations.
    """
    sizes = [size for size, _ in points]
    programs = [program for _, program in points]
    check_structure(sizes, [structure_of(program) for program in programs])

    def at(size: int) -> StepProgram:
        weights = _weights(sizes, size)

        @cache
        def value(values: tuple[float, ...]) -> int:
            total = sum(w * Fraction(v) for w, v in zip(weights, values, strict=True))
            return max(0, ceil(total))

        return combined(programs, value)

    return at


def check_structure(sizes: Sequence[int], structures: Sequence[object]) -> None:
    """Check that programs that were recorded at *sizes* are alike.

    Raises:
        OtherOperationsError: they are not.
    """
    if any(structure != structures[0] for structure in structures[1:]):
        raise OtherOperationsError(
            f"the step runs other operations at the sizes {sizes}: record it at the size that "
            "is wanted."
        )


def combined(
    programs: Sequence[StepProgram],
    value: Callable[[tuple[float, ...]], int],
) -> StepProgram:
    """Return programs of one structure as one.

    Args:
        programs: what is combined.
        value: makes one number of bytes or FLOPs of those that the programs have in a place.
    """
    first = programs[0]

    def call(calls: tuple[KernelCall | None, ...]) -> KernelCall | None:
        if calls[0] is None:
            return None
        sizes = zip(*(each.sizes for each in calls if each is not None), strict=True)
        return calls[0]._replace(sizes=tuple(value(size) for size in sizes))

    def operation(same: tuple[Operation, ...]) -> Operation:
        # Workspaces are rounded up to blocks of kernels: their shapes grow by the polynomial,
        # their bytes do not.
        found = call(tuple(each.call for each in same))
        return same[0]._replace(
            flops=float(value(tuple(each.flops for each in same))),
            traffic_bytes=value(tuple(each.traffic_bytes for each in same)),
            workspace_bytes=workspace_of(found, first.kernels),
            call=found,
        )

    operations = tuple(
        operation(same) for same in zip(*(program.operations for program in programs), strict=True)
    )
    buffers = tuple(
        same[0]._replace(nbytes=value(tuple(each.nbytes for each in same)))
        for same in zip(*(program.buffers for program in programs), strict=True)
    )
    slots = tuple(
        same[0]._replace(
            nbytes=value(tuple(each.nbytes for each in same)),
            link_bytes=value(tuple(each.link_bytes for each in same)),
        )
        for same in zip(*(program.slots for program in programs), strict=True)
    )
    packs = tuple(
        same[0]._replace(nbytes=value(tuple(each.nbytes for each in same)))
        for same in zip(*(program.packs for program in programs), strict=True)
    )
    return dataclasses.replace(
        first,
        operations=operations,
        buffers=buffers,
        slots=slots,
        packs=packs,
        resident_bytes=value(tuple(program.resident_bytes for program in programs)),
        graph=_resized(first.graph, buffers),
        forms={},
    )


def _resized(graph: LayerGraph | None, buffers: Sequence[Buffer]) -> LayerGraph | None:
    """Return *graph* with the bytes that its values have in *buffers*."""
    if graph is None:
        return None
    values = tuple(
        each if each.buffer < 0 else each._replace(nbytes=buffers[each.buffer].nbytes)
        for each in graph.values
    )
    return dataclasses.replace(graph, values=values)


def _weights(sizes: Sequence[int], size: int) -> list[Fraction]:
    """Return Lagrange's weights of the values at *sizes* in the value at *size*."""
    weights = []
    for own in sizes:
        weight = Fraction(1)
        for other in sizes:
            if other != own:
                weight *= Fraction(size - other, own - other)
        weights.append(weight)
    return weights


def structure_of(program: StepProgram) -> tuple[object, ...]:
    """Return what of *program* is no number of bytes or FLOPs."""
    return (
        [
            (
                *(each.name, each.path, each.is_kernel, each.num_runs),
                each.call and each.call.kernel,
            )
            for each in program.operations
        ],
        [(each.birth, each.death) for each in program.buffers],
        [each._replace(nbytes=0, link_bytes=0, row_values=0) for each in program.slots],
        [each._replace(nbytes=0) for each in program.packs],
        program.segments,
        program.layer_names,
        None if program.graph is None else _structure_of(program.graph),
    )


def _structure_of(graph: LayerGraph) -> tuple[object, ...]:
    return (graph.layer, graph.operations, [each._replace(nbytes=0) for each in graph.values])
