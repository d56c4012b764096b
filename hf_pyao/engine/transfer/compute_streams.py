"""The stream that compute runs on. See [Note: Stream order] in ``transport``."""

from __future__ import annotations

from collections.abc import Callable

import torch

WITHOUT_STREAMS = ("cpu", "meta")
"""Types of devices that have no streams."""

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda key: 1)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that compute on *device* is queued on now; None on a CPU."""
    if device.type in WITHOUT_STREAMS:
        return None
    return torch.accelerator.current_stream(device.index)  # an index is found faster than a device


def streams_now() -> dict[torch.device, torch.Stream]:
    """Return the stream that compute is queued on now, on the current device; none on a CPU."""
    if not torch.accelerator.is_available():
        return {}
    stream = torch.accelerator.current_stream()
    return {stream.device: stream}


def visitor_of(home: torch.Stream | None) -> torch.Stream | None:
    """Return the stream that compute is queued on now, if it is not *home*; else None."""
    if home is None:
        return None
    stream = torch.accelerator.current_stream(home.device_index)
    return None if stream == home else stream


def lend(tensor: torch.Tensor, home: torch.Stream, visitor: torch.Stream) -> torch.Tensor:
    """Let *visitor* read *tensor*, whose memory is of stream *home*; return it.

    The allocator gives the memory to no one before *visitor* has come to the point at which the
    tensor was let go.
    """
    visitor.wait_stream(home)
    tensor.record_stream(visitor)
    return tensor


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and objects hold *storage*; where torch does not tell: one."""
    return _use_count(storage._cdata)
