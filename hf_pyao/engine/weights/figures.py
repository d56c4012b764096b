"""What streaming came to: uploads, bytes, and the time that they took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass
class UploadFigures:
    """Sums over all uploads of a ring; the meter of its copies."""

    num_uploads: int = 0
    """Blocks that were copied to the device."""
    num_late_uploads: int = 0
    """Those whose copy began only as compute asked for them."""
    uploaded_bytes: int = 0
    """Bytes that they copied."""
    num_left: int = 0
    """Times that a block's memory was left to someone who still held a view of it."""
    left_bytes: int = 0
    """Bytes of that memory, added up."""
    disk_read_bytes: int = 0
    """Bytes that were read from the disk and agreed with their checksums."""
    disk_read_ms: float = 0.0
    """Time in which some thread read the disk."""
    num_disk_retries: int = 0
    """Reads of up to 8 MiB that failed or disagreed, and were made once more."""
    disk_wait_ms: float = 0.0
    """Time in which the thread that runs the model waited for reads."""
    disk_check_ms: float = 0.0
    """Time in which checksums were computed, on threads of their own, added up."""
    staging_bytes: int = 0
    """Host memory that blocks are read into."""
    transfer_ms: float = 0.0
    """Time in which uploads ran."""
    stall_forward_ms: float = 0.0
    """Time in which forward compute waited for uploads."""
    stall_backward_ms: float = 0.0
    """Time in which backward compute waited for uploads."""
    device_peak_bytes: int = 0
    """Most device memory allocated so far, where the device counts it."""
    host_peak_bytes: int = 0
    """Not counted here: the weights' memory is reserved once."""
    pool_bytes: int = 0
    """Bytes of the streamed weights on the host."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for a report."""
        values = dataclasses.asdict(self)
        del values["host_peak_bytes"], values["device_peak_bytes"]
        values["host_bytes"] = values.pop("pool_bytes")
        return values


@dataclass
class OnDemandFigures(UploadFigures):
    """Sums over all reads of weights outside of the layers; an upload is that of a whole weight."""

    num_gathers: int = 0
    """Look-ups of embeddings for which rows were uploaded."""
    gathered_rows: int = 0
    """Rows that were uploaded for them."""
    gathered_bytes: int = 0
    """Bytes of these rows."""
