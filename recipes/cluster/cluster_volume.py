"""Bytes of a gradient as an engine sends it, and how long a shaped link takes for bytes.

How often they are sent is in the note of ``../experiments/communication.py``.
"""

from __future__ import annotations

TCP_EFFICIENCY = 1448 / 1514
"""Payload of a full Ethernet frame (TCP over IPv4 with timestamps) by its bytes on a shaped link.

``tc`` counts the frame's header but neither preamble nor gap; on a real wire it is 1448 / 1538."""


def gradient_bytes(engine: str, precision: str, num_parameters: int) -> int:
    """Return the bytes of one whole gradient as *engine* sends it.

    DDP's weights stay in float32, and so do their gradients, under autocast too.
    """
    is_half = precision == "bf16" and engine != "ddp"
    return num_parameters * (2 if is_half else 4)


def link_seconds(num_bytes: float, rate_mbit: float) -> float:
    """Return how long a link of *rate_mbit* takes for *num_bytes* of payload."""
    return num_bytes * 8 / (rate_mbit * 1e6 * TCP_EFFICIENCY)
