"""What streaming frozen weights comes to: blocks, bytes on device and host, uploads of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_pyao.plan.predict.predicted_uploads import uploads_of
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.plan.step.streamed_step import with_streamed_blocks


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The blocks of a step that are streamed. A block is the frozen weights of one layer."""

    num_layers: int
    streamed_layers: tuple[int, ...]
    """Positions in forward order; the others stay on the device."""
    device_bytes: int
    """Of the ring: slots times their size."""
    host_bytes: int
    """Page-locked masters of the streamed blocks, at their exact sizes."""
    num_uploads: int
    """In each step but the first."""
    uploaded_bytes: int
    """In each step but the first."""
    disk_layers: tuple[int, ...] = ()
    """Those of the streamed layers whose weights are on a disk."""
    disk_bytes: int = 0
    """Bytes of these weights."""
    disk_read_bytes: int = 0
    """Read in each step but the first."""

    @property
    def num_resident(self) -> int:
        """Blocks that stay: what ``PyAOConfig.stream_weights`` takes as a number."""
        return self.num_layers - len(self.streamed_layers)


def weight_plan_of(program: StepProgram) -> WeightPlan:
    """Return what *program* streams."""
    streamed = program.streamed
    on_disk = frozenset(streamed.disk_layers)
    uploads = uploads_of(program, is_first_step=False)
    return WeightPlan(
        num_layers=program.num_layers,
        streamed_layers=streamed.layers,
        device_bytes=streamed.device_bytes,
        host_bytes=streamed.host_bytes,
        num_uploads=len(uploads),
        uploaded_bytes=sum(nbytes for _, nbytes, _ in uploads),
        disk_layers=streamed.disk_layers,
        disk_bytes=streamed.disk_bytes,
        disk_read_bytes=sum(nbytes for _, nbytes, layer in uploads if layer in on_disk),
    )


def less_by_streaming(program: StepProgram) -> str:
    """Say what streaming weights would take off the device; empty where it would nothing.

    Args:
        program: the step.
    """
    if program.streamed:
        return ""
    saved_bytes = with_streamed_blocks(program, range(program.num_layers)).streamed.saved_bytes
    if saved_bytes <= 0:
        return ""
    return f"stream_weights='auto' ({saved_bytes / 1e9:.2f} GB less)"


def figures_of(weights: WeightPlan) -> dict[str, float]:
    """Return figures of a plan with streamed weights, by name."""
    return {
        "weights/resident_blocks": float(weights.num_resident),
        "weights/streamed_blocks": float(len(weights.streamed_layers)),
        "weights/ring_bytes": float(weights.device_bytes),
        "weights/uploads": float(weights.num_uploads),
        "weights/uploaded_bytes": float(weights.uploaded_bytes),
        "weights/host_bytes": float(weights.host_bytes),
        "weights/disk_blocks": float(len(weights.disk_layers)),
        "weights/disk_bytes": float(weights.disk_bytes),
        "weights/disk_read_bytes": float(weights.disk_read_bytes),
    }


def said_of(figures: Mapping[str, float]) -> str:
    """Say in one line what a plan with these figures streams; empty if it is not about that."""
    if "weights/streamed_blocks" not in figures:
        return ""
    streamed, stay = (int(figures[f"weights/{name}_blocks"]) for name in ("streamed", "resident"))
    if not streamed:
        return "all weights stay on the device: nothing is gained by streaming them"
    return (
        f"weights: {streamed} of {streamed + stay} layers are streamed through a ring of "
        f"{figures['weights/ring_bytes'] / 1e9:.2f} GB: {int(figures['weights/uploads'])} uploads "
        f"and {figures['weights/uploaded_bytes'] / 1e9:.2f} GB a step; the host holds "
        f"{figures['weights/host_bytes'] / 1e9:.2f} GB of them{_said_of_disk(figures)}. Train with "
        f"stream_weights={stay}, or follow the plan with stream_weights='auto'"
    )


def _said_of_disk(figures: Mapping[str, float]) -> str:
    number = int(figures.get("weights/disk_blocks", 0))
    if not number:
        return ""
    return (
        f", and the disk {number} blocks with {figures['weights/disk_bytes'] / 1e9:.2f} GB, of "
        f"which {figures['weights/disk_read_bytes'] / 1e9:.2f} GB are read a step (disk_path)"
    )
