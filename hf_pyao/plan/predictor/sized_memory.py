"""The memory of a way to train at one size, by any of the plans that it may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.outcome import Outcome


class SizedMemory:
    """The memory of one size: that of the first plan that fits.

    Args:
        plans: what each plan that may be followed comes to.
    """

    def __init__(self, plans: Sequence[Outcome]) -> None:
        self._plans = sorted(plans, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak of the plan that takes the least, before any rounding."""
        return self._plans[0].memory.peak_bytes

    def fits(self, limit_bytes: float, settings: AllocatorSettings) -> bool:
        """Say whether a plan fits where *limit_bytes* may be reserved."""
        return any(each.under(settings).fits(limit_bytes) for each in self._plans)

    def leaves_room(self, limit_bytes: float, settings: AllocatorSettings) -> bool:
        """Say whether a plan never comes to *limit_bytes*, though nothing is given back."""
        return any(
            each.memory.peak_bytes <= limit_bytes
            and each.under(settings).reserved().reserved_bytes <= limit_bytes
            for each in self._plans
        )

    def needed_about(self, limit_bytes: float, settings: AllocatorSettings) -> int:
        """Return about what is needed, above *limit_bytes* if no plan fits."""
        return self._first_fitting(limit_bytes, settings).needed_about(limit_bytes)

    def reserved_about(self, limit_bytes: float, settings: AllocatorSettings) -> int:
        """Return what is reserved, above *limit_bytes* if no plan fits.

        See :meth:`~hf_pyao.plan.predict.allocator_replay.StepMemory.reserved_about`.
        """
        return self._first_fitting(limit_bytes, settings).reserved_about(limit_bytes)

    def _first_fitting(self, limit_bytes: float, settings: AllocatorSettings) -> StepMemory:
        memories = [each.under(settings) for each in self._plans]
        return next((each for each in memories if each.fits(limit_bytes)), memories[0])


USUAL_SHARE = 17 / 16
"""Bytes that the allocator usually needs for each byte of tensors at the peak."""

NEAR = 1 / 32
"""What is needed is replayed where it is within this share of the limit."""


class NeededAt:
    """About what is needed at each size, by few replays.

    Whether a size fits is always replayed. What the allocator needs beside the tensors is nearly
    the same share of them at neighbouring sizes. So it is found at few sizes, by replays at several
    limits: where the share that is known says otherwise than whether the size fits, and where the
    size fits barely, or barely does not.

    Args:
        memory_at: the memory of a size.
        limit_bytes: what may be reserved.
        settings: the allocator's.
        share: bytes needed for each byte of the peak, as far as is known.
        is_recorded: a step of another size takes longer than some replays: those of what barely
            does not fit are worth it.
    """

    def __init__(
        self,
        memory_at: Callable[[int], SizedMemory],
        limit_bytes: int,
        settings: AllocatorSettings,
        share: float = USUAL_SHARE,
        *,
        is_recorded: bool = True,
    ) -> None:
        self._memory_at = memory_at
        self._limit_bytes = limit_bytes
        self._settings = settings
        self.share = share
        self._is_recorded = is_recorded

    def __call__(self, size: int) -> int:
        """Return about what *size* needs, above the limit if it does not fit."""
        memory, limit_bytes = self._memory_at(size), self._limit_bytes
        peak_bytes = memory.peak_bytes
        if peak_bytes > limit_bytes:
            return int(self.share * peak_bytes)
        beyond_bytes = self.share * peak_bytes - limit_bytes
        fits = memory.fits(limit_bytes, self._settings)
        is_near = abs(beyond_bytes) < NEAR * limit_bytes and (fits or self._is_recorded)
        if is_near or fits != (beyond_bytes <= 0):
            self.share = memory.needed_about(limit_bytes, self._settings) / peak_bytes
        return int(self.share * peak_bytes)
