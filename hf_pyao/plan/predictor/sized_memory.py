"""The memory of a way to train at one size, by any of the plans that it may follow."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pyao.plan.hardware.caching_allocator import AllocatorSettings
from hf_pyao.plan.predict.allocator_replay import StepMemory
from hf_pyao.plan.predict.outcome import Outcome


class SizedMemory:
    """The memory of one size: that of the first plan that fits.

    Args:
        plans: what each plan that may be followed comes to.
        later_bytes: what is on the device while the optimizer steps.
    """

    def __init__(self, plans: Sequence[Outcome], later_bytes: int) -> None:
        self._plans = sorted(plans, key=lambda each: each.peak_bytes)
        self._later_bytes = later_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak of the plan that takes the least, before any rounding."""
        return max(self._plans[0].peak_bytes, self._later_bytes)

    def fits(self, limit_bytes: float, settings: AllocatorSettings) -> bool:
        """Say whether a plan fits where *limit_bytes* may be reserved."""
        return self._later_bytes <= limit_bytes and any(
            each.under(settings).fits(limit_bytes) for each in self._plans
        )

    def leaves_room(self, limit_bytes: float, settings: AllocatorSettings) -> bool:
        """Say whether a plan never comes to *limit_bytes*, though nothing is given back."""
        return self._later_bytes <= limit_bytes and any(
            each.peak_bytes <= limit_bytes
            and each.under(settings).reserved().reserved_bytes <= limit_bytes
            for each in self._plans
        )

    def reserved_about(self, limit_bytes: float, settings: AllocatorSettings) -> int:
        """Return what is reserved, above *limit_bytes* if no plan fits.

        See :meth:`~hf_pyao.plan.predict.allocator_replay.StepMemory.reserved_about`.
        """
        reserved_bytes = self._first_fitting(limit_bytes, settings).reserved_about(limit_bytes)
        return max(reserved_bytes, self._later_bytes)

    def _first_fitting(self, limit_bytes: float, settings: AllocatorSettings) -> StepMemory:
        memories = [each.under(settings) for each in self._plans]
        return next((each for each in memories if each.fits(limit_bytes)), memories[0])
