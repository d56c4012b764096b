"""What is on the device while the optimizer steps: weights, states, gradients, and its temporaries.

Activations are gone by then, so that it sets the peak only where they were few, or where an
optimizer takes much: torch's foreach AdamW as much as all weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.plan.hardware.beside_step import FUSED, optimizer_temporaries
from hf_pyao.plan.step.step_program import BACKWARD, StepProgram


def optimizer_step_bytes(
    program: StepProgram, implementation: str = FUSED, *, has_moments: bool = True
) -> int:
    """Return the most bytes on the device while the optimizer steps after *program*.

    Args:
        program: a step whose gradients stay, and whose resident bytes hold the optimizer's states.
        implementation: one of :data:`~hf_pyao.plan.hardware.beside_step.IMPLEMENTATIONS`.
        has_moments: whether it is an Adam.
    """
    sizes = [program.buffers[number].nbytes for number in gradients_of(program)]
    more = optimizer_temporaries(sizes, implementation, has_moments=has_moments)
    return program.resident_bytes + sum(sizes) + more.nbytes


def gradients_of(program: StepProgram) -> set[int]:
    """Return the buffers that hold the parameters' gradients when *program* is over."""
    first = next((s.start for s in program.segments if s.phase == BACKWARD), None)
    if first is None:
        return set()
    end = program.num_operations
    stay = [
        number
        for number, buffer in enumerate(program.buffers)
        if buffer.birth >= first and buffer.death >= end
    ]
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
