"""The budget policy: the first so many tensors, or bytes, of each forward leave the device.

NeuroCache offloads the first k saved tensors of a step and looks for the k beyond which more cost
time and free little; Megatron-Core bounds what it offloads by what the link carries under compute.
Both are this rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.engine.runtime.policy import (
    BELOW_MIN_BYTES,
    Decision,
    Keep,
    Offload,
    Policy,
    Situation,
)
from hf_pyao.engine.runtime.slots import Slot
from hf_pyao.errors import ConfigError
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.step.collectives import without_collectives
from hf_pyao.plan.step.step_program import FORWARD, StepProgram

OVER_BUDGET = "over budget"

_OFFLOAD = Offload()
_KEEP_SMALL = Keep(BELOW_MIN_BYTES)
_KEEP_OVER = Keep(OVER_BUDGET)


class OffloadBudget(Policy):
    """Offload what is saved first in each forward, within a budget; keep the rest.

    What stays in any case, and what is too small, takes nothing of the budget. Of bytes, a tensor
    that does not fit is passed over, and a smaller one behind it may still leave.

    Args:
        min_bytes: least size of what leaves.
        max_tensors: most tensors that leave in a forward; None: as many as there are.
        max_bytes: most bytes that leave in a forward; None: no bound.

    Raises:
        ConfigError: neither bound is given.
    """

    name = "budget"

    def __init__(
        self, min_bytes: int, *, max_tensors: int | None = None, max_bytes: int | None = None
    ) -> None:
        if max_tensors is None and max_bytes is None:
            raise ConfigError(
                "a budget needs max_tensors or max_bytes: give one of them.", key="setting-missing"
            )
        self.min_bytes = min_bytes
        self.max_tensors = max_tensors
        self.max_bytes = max_bytes

    def for_forward(self) -> OffloadBudget:
        """Return a policy that has the whole budget before it, for one forward."""
        return _Spending(self)

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Offload *slot* if it is within the budget on its own."""
        return self.for_forward().decide(slot, situation)


class _Spending(OffloadBudget):
    """A budget of which a forward has used some."""

    def __init__(self, budget: OffloadBudget) -> None:
        super().__init__(
            budget.min_bytes, max_tensors=budget.max_tensors, max_bytes=budget.max_bytes
        )
        self._num_left = budget.max_tensors
        self._bytes_left = budget.max_bytes

    def decide(self, slot: Slot, situation: Situation) -> Decision:
        """Offload *slot* if the budget has room for it, which is less then."""
        decision = self.would_decide(slot, situation)
        if decision is _OFFLOAD and situation.stays is None:
            if self._num_left is not None:
                self._num_left -= 1
            if self._bytes_left is not None:
                self._bytes_left -= slot.nbytes
        return decision

    def would_decide(self, slot: Slot, situation: Situation) -> Decision:
        """Say the same, and use nothing of the budget."""
        if slot.nbytes < self.min_bytes:
            return _KEEP_SMALL
        if situation.stays is not None:
            return _OFFLOAD  # whatever is said, it stays
        if self._num_left == 0 or (self._bytes_left is not None and slot.nbytes > self._bytes_left):
            return _KEEP_OVER
        return _OFFLOAD


def leaving(program: StepProgram, policy: Policy, keep_last_layers: int) -> list[bool]:
    """Return which slots of a recorded step leave the device under *policy*.

    Args:
        program: the step.
        policy: it is asked as in a forward.
        keep_last_layers: last layers of which nothing leaves; they take nothing of a budget.
    """
    first_kept = program.num_layers - keep_last_layers
    policy = policy.for_forward()
    found = []
    for use in program.slots:
        slot = Slot(program.layer_names[use.layer], use.layer, use.name, 0, use.nbytes, None)
        found.append(
            use.stays is None
            and use.layer < first_kept
            and isinstance(policy.decide(slot, Situation()), Offload)
        )
    return found


def hidden_bytes(program: StepProgram, times_ms: Sequence[float], link: LinkModel) -> int:
    """Return what *link* carries while forward computes (Megatron-Core's rule of thumb)."""
    times_ms = without_collectives(times_ms, program.operations)
    forward_ms = sum(
        sum(times_ms[segment.start : segment.end])
        for segment in program.segments
        if segment.phase == FORWARD
    )
    return int(link.d2h_gib_per_s * GIB * forward_ms / 1e3)
