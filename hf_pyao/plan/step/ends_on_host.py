"""A recorded step whose embeddings and head are on the host.

Between two reads they take nothing of the device. Rows of an embedding are as many bytes as its
result at most, and live as long as the look-up: they are not counted. The head's weight is there
from the head's forward until its backward has read it. No layer runs between the two, so that this
is one stretch of the step.
"""

from __future__ import annotations

import dataclasses

from hf_pyao.plan.step.step_program import (
    BACKWARD,
    OUTSIDE,
    READ_BY_ROWS,
    READ_WHOLE,
    Buffer,
    StepProgram,
)


def ends_bytes(program: StepProgram) -> int:
    """Return the bytes of frozen embeddings and head that are on the device in *program*."""
    return sum(each.nbytes for each in program.residents if each.end)


def with_ends_on_host(program: StepProgram) -> StepProgram:
    """Return *program* with the frozen weights of embeddings and head on the host.

    A weight that is read as a whole stays where it cannot be told when that is.

    Args:
        program: a step; one whose ends are on the host already is returned as it is.
    """
    head = _head_of(program)
    ends = (READ_BY_ROWS,) if head is None else (READ_BY_ROWS, READ_WHOLE)
    gone = [each for each in program.residents if each.end in ends]
    if not gone:
        return program
    buffers = [Buffer(each.nbytes, *head) for each in gone if head and each.end == READ_WHOLE]
    return dataclasses.replace(
        program,
        buffers=(*program.buffers, *buffers),
        residents=tuple(each for each in program.residents if each.end not in ends),
        resident_bytes=program.resident_bytes - sum(each.nbytes for each in gone),
    )


def _head_of(program: StepProgram) -> tuple[int, int] | None:
    """Return the first operation behind the layers' forward, and the first of their backward.

    None if the step has no such stretch.
    """
    segments = program.segments
    backward = next(
        (n for n, each in enumerate(segments) if each.phase == BACKWARD and each.layer != OUTSIDE),
        None,
    )
    if backward is None:
        return None
    first = backward
    while first and segments[first - 1].layer == OUTSIDE:
        first -= 1
    start, end = segments[first].start, segments[backward].start
    return (start, end) if first and start < end else None
