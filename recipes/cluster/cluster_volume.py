"""How many bytes an engine's collectives move in one step: counted on paper, checked on the wire.

Per optimizer step each of N nodes sends ``c * (N - 1) / N * B`` bytes; B is one whole gradient:

- ``ddp``: one all-reduce of the gradient, c = 2, over however many micro-steps it was accumulated;
- ``zero1``: the same, and the all-gather of the updated weights, c = 3;
- ``zero2``: gradients are split over the nodes, so that each micro-step has to reduce its own:
  DeepSpeed does so by an all-reduce, c = 2 for each micro-step, and 1 for the all-gather.
"""

from __future__ import annotations

from hf_pyao.errors import unknown_name

TCP_EFFICIENCY = 1448 / 1514
"""Payload of a full Ethernet frame (TCP over IPv4 with timestamps) by its bytes on a shaped link.

``tc`` counts the frame's header but neither preamble nor gap; on a real wire it is 1448 / 1538."""


def volume_coefficient(engine: str, gradient_accumulation: int) -> int:
    """Return c above: gradients that one optimizer step moves, in units of (N - 1) / N * B.

    Raises:
        ConfigError: there is no such engine.
    """
    coefficients = {"ddp": 2, "zero1": 3, "zero2": 2 * gradient_accumulation + 1}
    if engine not in coefficients:
        raise unknown_name("--engine", engine, coefficients)
    return coefficients[engine]


def bytes_per_step(
    engine: str, *, nodes: int, gradient_accumulation: int, gradient_bytes: float
) -> float:
    """Return the payload bytes that each node sends in one optimizer step."""
    share = (nodes - 1) / nodes
    return volume_coefficient(engine, gradient_accumulation) * share * gradient_bytes


def gradient_bytes(engine: str, precision: str, num_parameters: int) -> int:
    """Return the bytes of one whole gradient as *engine* sends it.

    DDP's weights stay in float32, and so do their gradients, under autocast too.
    """
    is_half = precision == "bf16" and engine != "ddp"
    return num_parameters * (2 if is_half else 4)


def link_seconds(num_bytes: float, rate_mbit: float) -> float:
    """Return how long a link of *rate_mbit* takes for *num_bytes* of payload."""
    return num_bytes * 8 / (rate_mbit * 1e6 * TCP_EFFICIENCY)
