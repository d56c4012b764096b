"""What a disk below the host costs a step, by its speeds and the bytes of the step."""

from __future__ import annotations

import math

GIB = 2**30


def predicted_step_ms(
    *,
    forward_ms: float,
    backward_ms: float,
    written_bytes: float,
    read_bytes: float,
    write_gib_per_s: float,
    read_gib_per_s: float,
) -> float:
    """Return the time of a step whose saved tensors are written in forward, and read in backward.

    Writes run beside forward and reads beside backward, so that each takes the longer of both. What
    is written as backward begins, and the first read, are not counted: the host memory in front of
    the disk has what backward asks for first.

    Args:
        forward_ms: time of forward without a disk.
        backward_ms: time of backward without a disk.
        written_bytes: that the step writes.
        read_bytes: that it reads.
        write_gib_per_s: speed of the disk, in GiB/s (2**30 bytes).
        read_gib_per_s: likewise.
    """
    write_ms = _ms(written_bytes, write_gib_per_s)
    return max(forward_ms, write_ms) + max(backward_ms, _ms(read_bytes, read_gib_per_s))


def _ms(nbytes: float, gib_per_s: float) -> float:
    if not nbytes:
        return 0.0
    return nbytes / GIB / gib_per_s * 1e3 if gib_per_s > 0 else math.inf
