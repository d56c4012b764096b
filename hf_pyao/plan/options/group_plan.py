"""How the samples and heads of one call of attention are divided into groups.

[Note: Groups] Attention treats each pair of a sample and a head by itself, and a kernel allocates
its temporaries for all pairs that it is given. A group is a contiguous range of the pairs in the
order sample by sample, head by head: several whole samples, or some heads of one sample. Query
heads that share a key-value head stay together, because the gradient of that head is a sum over
them. The order matters for dropout: flash attention draws a pair's mask at the position of the
pair in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hf_pyao.plan.step.loops import repeated

MIB = 2**20

TARGET_BYTES = 64 * MIB
"""With ``"auto"``, a group need not allocate less than this: it is little beside a layer."""


class Group(NamedTuple):
    """A range of samples and a range of key-value heads."""

    first_sample: int
    end_sample: int
    first_head: int
    """First key-value head."""
    end_head: int

    def size(self) -> tuple[int, int]:
        """Return the numbers of samples and of key-value heads."""
        return self.end_sample - self.first_sample, self.end_head - self.first_head


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one call, in the order of samples and heads."""

    num_samples: int
    num_heads: int
    """Key-value heads."""
    num_sample_groups: int
    num_head_groups: int
    """Above 1 only where each sample is a group of its own or is divided."""

    @property
    def num_groups(self) -> int:
        """Number of groups; with 1 the call is not divided."""
        return self.num_sample_groups * self.num_head_groups

    def groups(self) -> Iterator[Group]:
        """Yield the groups, in the order of samples and heads; sizes differ by one at most."""
        groups = [
            Group(*samples, *heads)
            for samples in _ranges(self.num_samples, self.num_sample_groups)
            for heads in _ranges(self.num_heads, self.num_head_groups)
        ]
        return repeated(groups, size_of=Group.size)


def plan_groups(
    setting: int | str,
    *,
    num_samples: int,
    num_heads: int,
    pair_bytes: int,
    least_pairs: int,
    least_pairs_of_auto: int,
) -> GroupPlan:
    """Divide a call of attention into groups.

    The plan depends on the arguments alone, so that ranks, recordings and second runs agree.

    Args:
        setting: a number of groups, or ``"auto"``: as many as keep what a group's kernel allocates
            at :data:`TARGET_BYTES`, while each group has enough pairs to fill the device.
        num_samples: samples of the call.
        num_heads: its key-value heads.
        pair_bytes: bytes that the kernel allocates inside for one sample and one key-value head.
        least_pairs: fewest pairs of a sample and a key-value head that a group may have.
        least_pairs_of_auto: the same with ``"auto"``.
    """
    sample_bytes = num_heads * pair_bytes
    if isinstance(setting, int):
        wanted, least = setting, least_pairs
    else:
        wanted = -(-num_samples * sample_bytes // TARGET_BYTES)
        least = max(least_pairs, least_pairs_of_auto)
    by_samples = _most(wanted, num_samples, -(-least // num_heads))
    by_heads = 1
    if by_samples == num_samples:
        by_heads = _most(-(-wanted // num_samples), num_heads, least)
    return GroupPlan(num_samples, num_heads, by_samples, by_heads)


def _most(wanted: int, size: int, least: int) -> int:
    """Return the number of parts nearest to *wanted* of *size*, each with *least* or more."""
    return max(1, min(wanted, size // max(least, 1)))


def _ranges(size: int, num_parts: int) -> Iterator[tuple[int, int]]:
    for part in range(num_parts):
        yield size * part // num_parts, size * (part + 1) // num_parts
