"""``EstimateReport``: what a model's training would take on a card, one row for each way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.schema import JsonDocument


@dataclass(frozen=True, kw_only=True)
class EstimateRow:
    """One way to train, as estimated. Sizes are in bytes."""

    method: str
    largest_micro_batch: int
    """Samples of the asked length that fit; 0: not even one."""
    largest_with_expandable_segments: int | None = None
    """The same with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``; None where that is set
    already."""
    longest_sequence: int | None = None
    """Tokens of a single sample that fit; None: it was not looked for."""
    is_length_limited_by_positions: bool = False
    """True if the model has no positions beyond :attr:`longest_sequence`."""
    micro_batch: int
    """What the figures below are for: the one that was asked for, else the largest."""
    fits: bool
    peak_bytes: int
    """Most that is allocated at once; an upper bound for every link."""
    reserved_bytes: int | None = None
    """What PyTorch's allocator reserves; None in estimates of earlier versions."""
    peak_phase: str
    """``"forward"`` or ``"backward"``."""
    peak_where: str
    """The layer in which the peak is; ``"outside of layers"`` for embeddings, head and loss."""
    peak_tensor: str
    """The tensor without which the peak would be lowest."""
    peak_tensor_bytes: int
    next_peak_bytes: int
    """The peak without it."""
    step_ms: float
    """Forward and backward of the micro-batch."""
    compute_ms: float
    """The same without waiting for copies."""
    tokens_per_s: float
    host_bytes: int
    """Activations on the host at once, all of it pinned where there is a device."""
    offloaded_bytes: int
    """What leaves the device in a step."""
    hidden: float | None = None
    """Share of the copies' time that passes under compute; None if nothing is copied."""
    workspace_bytes: int = 0
    """What the kernel that allocates most inside takes, while it runs. :attr:`peak_bytes` holds
    what of it is there at the peak."""
    workspace_of: str = ""
    """Its operation."""
    workspace_parts: dict[str, int] = field(default_factory=dict)
    """The same by the names that the kernel's source gives the tensors."""
    optimizer_step_bytes: int = 0
    """Most on the device while the optimizer steps; 0 if it is not there."""
    num_streamed_blocks: int = 0
    """Layers whose frozen weights are uploaded for each pass."""
    num_resident_blocks: int | None = None
    """Those whose weights stay, where some could be streamed; None where the row streams none."""
    uploaded_bytes: int = 0
    """Streamed weights that are uploaded in a step."""
    weights_host_bytes: int = 0
    """Masters of streamed weights on the host, beside :attr:`host_bytes`."""
    num_disk_blocks: int = 0
    """Layers whose streamed weights are on a disk."""
    weights_disk_bytes: int = 0
    """Bytes of these weights."""
    disk_read_bytes: int = 0
    """Bytes of them that are read in a step."""
    tokens_to_hide: float | None = None
    """Tokens of a micro-batch at which uploads pass under compute: two operations for each
    parameter and token."""
    tokens_to_hide_by_clock: float | None = None
    """The same by the estimated time of a pass over a layer."""
    recomputed_modules: list[str] = field(default_factory=list)
    """What PyAO's rule flags."""


@dataclass(frozen=True, kw_only=True)
class EstimateReport(JsonDocument):
    """Ways to train one model on one card, estimated and not measured."""

    schema_version: int = 1
    kind: str = "estimate"
    title: str
    setup: dict[str, Any]
    """Model, sizes, engine and optimizer."""
    hardware: dict[str, Any]
    """Speeds and memory of the card, and where they are from."""
    is_measured: bool = False
    assumptions: list[str]
    memory: list[dict[str, Any]] = field(default_factory=list)
    """What of the card is set aside beside a step: names and bytes."""
    limit_bytes: int = 0
    """What is left for a step; 0: it is not known."""
    verdict: str
    provenance: Provenance
    rows: list[EstimateRow]
