"""What a step asks of the disk below the host, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_pyao.plan.hardware.speeds import DiskModel, LinkModel
from hf_pyao.plan.predict.copy_lanes import OFFLOAD, RELOAD
from hf_pyao.plan.predict.predicted_uploads import uploads_of
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, StepProgram


@dataclass(frozen=True, kw_only=True)
class DiskDemand:
    """What one step asks of a disk: saved tensors are written in forward and read in backward."""

    saved_bytes: int = 0
    """Saved tensors that find no room on the host."""
    weights_bytes: Mapping[str, int] = field(default_factory=dict)
    """Streamed weights that are read, by pass."""

    @classmethod
    def of(cls, program: StepProgram, offloaded_bytes: int, disk: DiskModel) -> DiskDemand:
        """Return what a step asks of *disk*.

        Args:
            program: the step.
            offloaded_bytes: what leaves the device.
            disk: says how much of that the host has room for.
        """
        room_bytes = disk.room_for_saved(program.streamed.host_bytes)
        on_disk = frozenset(program.streamed.disk_layers)
        weights_bytes = {FORWARD: 0, BACKWARD: 0}
        if on_disk:
            for phase, nbytes, layer in uploads_of(program):
                weights_bytes[phase] += nbytes if layer in on_disk else 0
        return cls(
            saved_bytes=int(max(0, offloaded_bytes - room_bytes)) if disk.takes_saved else 0,
            weights_bytes=weights_bytes,
        )

    def slower(self, disk: DiskModel) -> tuple[DiskModel, dict[str, float]]:
        """Return the disk as saved tensors find it, and by what reads of weights are slower.

        Both use it in the same pass. No more is taken for granted than that it does one thing at a
        time, at the speed that was measured for that alone: drives that read and write at once do
        better. So each gets the share of the time that it asks for.
        """
        none = {FORWARD: 1.0, BACKWARD: 1.0}
        if not self.saved_bytes or not any(self.weights_bytes.values()):
            return disk, none
        assert disk.write_gib_per_s is not None
        saved_ms = {FORWARD: disk.write_ms, BACKWARD: disk.read_ms}
        saved, weights = {}, {}
        for phase, access_ms in saved_ms.items():
            own_ms = access_ms(self.saved_bytes)
            reads_ms = disk.read_ms(self.weights_bytes.get(phase, 0))
            saved[phase] = 1 + reads_ms / own_ms
            weights[phase] = 1 + own_ms / reads_ms if reads_ms else 1.0
        seen = DiskModel(
            write_gib_per_s=disk.write_gib_per_s / saved[FORWARD],
            read_gib_per_s=disk.read_gib_per_s / saved[BACKWARD],
            host_bytes=disk.host_bytes,
            memory_bytes=disk.memory_bytes,
        )
        return seen, weights


def passes_ms(
    *,
    forward_ms: float,
    backward_ms: float,
    link: LinkModel,
    offloaded_bytes: int,
    demand: DiskDemand | None,
    uploaded_bytes: Mapping[str, int] | None = None,
) -> tuple[float, float]:
    """Return the times of both passes where compute stands still while copies run, as on a CPU.

    A disk works beside both, one thing at a time. The memory in front of it has what was saved
    last: that is not waited for in forward, and not read in backward.

    Args:
        forward_ms: compute of forward.
        backward_ms: compute of backward.
        link: what copies run at, and the disk.
        offloaded_bytes: that are copied to the host, and back.
        demand: what the disk is asked for; None: nothing.
        uploaded_bytes: of streamed weights, by pass; None: none.
    """
    uploaded = uploaded_bytes or {}
    own_ms = {FORWARD: forward_ms, BACKWARD: backward_ms}
    for phase, direction in ((FORWARD, OFFLOAD), (BACKWARD, RELOAD)):
        if offloaded_bytes:
            own_ms[phase] += link.copy_ms(direction, offloaded_bytes)
        if uploaded.get(phase):
            own_ms[phase] += link.copy_ms(RELOAD, uploaded[phase])
    disk = link.disk
    if disk is None or demand is None:
        return own_ms[FORWARD], own_ms[BACKWARD]
    saved, near = demand.saved_bytes, min(demand.saved_bytes, disk.memory_bytes)
    writes_ms = disk.write_ms(saved) if saved else 0.0
    weights = demand.weights_bytes
    reads_ms = {phase: disk.read_ms(weights.get(phase, 0)) for phase in (FORWARD, BACKWARD)}
    awaited_ms = writes_ms * (1 - near / saved) if saved else 0.0
    forward_ms = max(own_ms[FORWARD], awaited_ms + reads_ms[FORWARD])
    left_ms = max(0.0, writes_ms + reads_ms[FORWARD] - forward_ms)
    disk_ms = left_ms + reads_ms[BACKWARD] + disk.read_ms(saved - near)
    return forward_ms, max(own_ms[BACKWARD], disk_ms)
