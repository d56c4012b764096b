"""How large blocks of streamed weights are, and how many experts a group has.

Plans and the run compute their blocks with these functions, so that both have the same slots.
"""

from __future__ import annotations

from collections.abc import Iterable

GROUP_BYTES = 256 * 2**20
"""Largest group of experts: at 25 GB/s its upload takes 11 ms. Groups may be as large as the
largest block of other weights, where that is larger: the slots are that large anyway."""


def largest_block_bytes(other_bytes: Iterable[int]) -> int:
    """Return the most bytes of a block; a layer with more is divided by experts, if it has any.

    Args:
        other_bytes: of each streamed layer, the bytes of all streamed weights but its experts.
    """
    return max(GROUP_BYTES, max(other_bytes, default=0))


def experts_per_group(nbytes: int, num_experts: int, limit_bytes: int) -> int:
    """Return how many experts a group has; groups are about equally large.

    Args:
        nbytes: of all experts of the weights that are divided together; not 0.
        num_experts: how many experts these have.
        limit_bytes: of a group; one expert is the least.
    """
    most = max(1, limit_bytes * num_experts // nbytes)
    num_groups = -(-num_experts // most)
    return -(-num_experts // num_groups)
