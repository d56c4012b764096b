"""What a step with a plan carried out in it takes the host."""

from __future__ import annotations

from collections import Counter

from hf_pyao.plan.documents.profile import Profile
from hf_pyao.plan.hardware.host_model import HostCosts
from hf_pyao.plan.step.planned_step import PlannedStep
from hf_pyao.plan.step.step_program import FORWARD, OUTSIDE, StepProgram

FASTEST, SLOWEST = 0.25, 3.0
"""Times the defaults of :class:`HostCosts`: what is beyond was not measured well."""


def host_costs_of(profile: Profile, program: StepProgram) -> HostCosts | None:
    """Return what a step costs the host on which *profile* was measured.

    The first layer's forward tells, in which everything was offloaded. None: that was not
    measured, or the host is the device.
    """
    measured_ms = profile.host.get("layer_forward_ms")
    if measured_ms is None:
        return None
    least_bytes = profile.settings.get("min_bytes", 0)
    leaves = [each.stays is None and each.nbytes >= least_bytes for each in program.slots]
    costs = HostCosts(checkpoints_all=bool(profile.settings.get("checkpoint_every")))
    times_ms = host_times_ms(PlannedStep(program, leaves, {}, ()), costs)
    expected_ms = next(
        elapsed_ms
        for segment, elapsed_ms in zip(program.segments, times_ms, strict=True)
        if segment.layer != OUTSIDE
    )
    return HostCosts().scaled(min(max(FASTEST, measured_ms / expected_ms), SLOWEST))


def host_times_ms(step: PlannedStep, costs: HostCosts) -> tuple[float, ...]:
    """Return what the host takes to queue each segment of *step*, in ms.

    A layer is plain, or traced, or runs again as a whole.
    """
    program = step.program
    moved = Counter(
        slot.layer
        for slot, leaves in zip(program.slots, step.leaves, strict=True)
        if leaves and slot.link_bytes
    )
    replayed: Counter[int] = Counter()
    for number, rebuild in step.rebuilds.items():
        replayed[program.slots[number].layer] += len(rebuild.operations)
    is_resting = not (moved or replayed or costs.checkpoints_all)
    num_forward: Counter[int] = Counter()
    found = []
    for segment in program.segments:
        layer, is_forward = segment.layer, segment.phase == FORWARD
        num_operations = segment.end - segment.start
        total_ms = num_operations * (costs.op_ms if is_forward else costs.backward_op_ms)
        if layer != OUTSIDE and not is_resting:
            total_ms += moved[layer] * costs.move_ms
            if costs.checkpoints_all or layer < step.num_checkpointed:
                total_ms += costs.checkpoint_ms
                total_ms += 0.0 if is_forward else num_forward[layer] * costs.op_ms
            elif is_forward:
                total_ms += costs.hooks_ms
                total_ms += num_operations * costs.trace_ms if replayed[layer] else 0.0
            else:
                total_ms += replayed[layer] * costs.replay_ms
            if is_forward and not costs.checkpoints_all:  # else backward's segment has it again
                num_forward[layer] += num_operations
        found.append(total_ms)
    return tuple(found)
