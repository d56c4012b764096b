"""What is on the device while the optimizer steps: weights, states, gradients, and its temporaries.

Activations are gone by then, so that it sets the peak only where they were few, or where an
optimizer takes much: torch's foreach AdamW as much as all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_pyao.plan.step.step_program import BACKWARD, StepProgram


def optimizer_step_bytes(program: StepProgram) -> int:
    """Return the most bytes on the device while the optimizer steps; 0 if it is not there."""
    if program.optimizer_requests is None:
        return 0
    held_bytes = sum(program.buffers[number].nbytes for number in gradients_of(program))
    return program.resident_bytes + held_bytes + requested_bytes(program.optimizer_requests)


def requested_bytes(requests: Iterable[int]) -> int:
    """Return the most bytes that are there at once; *requests* as in a program."""
    made: list[int] = []
    now = most = 0
    for each in requests:
        if each < 0:
            now -= made[~each]
        else:
            made.append(each)
            now += each
            most = max(most, now)
    return most


def gradients_of(program: StepProgram) -> set[int]:
    """Return the buffers that hold the parameters' gradients when *program* is over.

    None where gradients were held before: its own were added to them.
    """
    first = next((s.start for s in program.segments if s.phase == BACKWARD), None)
    if first is None or program.holds_gradients:
        return set()
    end, table = program.num_operations, program.table
    stay = ((table.births >= first) & (table.deaths >= end)).nonzero()[0].tolist()
    return set(stay) - _summands(program, stay)


def _summands(program: StepProgram, stay: Sequence[int]) -> set[int]:
    """Return those of the buffers at the end that are let go there: summands of a gradient.

    A tied embedding has a gradient from the head and one from the tokens; the last operation adds
    them, and until it is over all three are there.
    """
    by_birth = sorted(stay, key=lambda number: program.buffers[number].birth)
    if not by_birth or program.operations[-1].name != "add":
        return set()
    last = program.buffers[by_birth[-1]]
    if last.birth != program.num_operations - 1:
        return set()
    alike = [n for n in by_birth[:-1] if program.buffers[n].nbytes == last.nbytes]
    return {alike[0], alike[-1]} if len(alike) > 1 else set()
