"""One profile of several ranks: means over all, as in the paper, and extremes.

PyAO averages each sub-module's time over the nodes (PyAO paper, section 5.5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import fmean

from hf_pyao.plan.documents.profile import Profile, ProfiledModule, Spread
from hf_pyao.plan.measure.segment_memory import largest

_DIRECTIONS = ("d2h_gib_per_s", "h2d_gib_per_s")


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Return the first of *profiles* with the times of all.

    Args:
        profiles: of the same steps, one for each rank.

    Returns:
        Times and speeds are means over the ranks, with least and most over all; the slowest links
        are told beside their mean. Of memory the most counts. Slots, program and timeline are the
        first rank's.
    """
    first = profiles[0]
    if len(profiles) == 1:
        return first
    by_path = [{module.path: module for module in profile.modules} for profile in profiles]
    modules = [
        _merged([modules[each.path] for modules in by_path if each.path in modules])
        for each in first.modules
    ]
    link = {each: _mean(profile.link.get(each) for profile in profiles) for each in _DIRECTIONS}
    least = {
        f"least_{each}": min(_known(profile.link.get(each) for profile in profiles), default=None)
        for each in _DIRECTIONS
    }
    metrics = {
        key: fmean(profile.metrics.get(key, 0.0) for profile in profiles) for key in first.metrics
    }
    peaks = [p.peak_allocated_bytes for p in profiles if p.peak_allocated_bytes is not None]
    grown_bytes = largest(profile.grown_bytes for profile in profiles)
    of_first = first.grown_bytes
    return dataclasses.replace(
        first,
        num_ranks=len(profiles),
        layer_forward=_spread(profile.layer_forward for profile in profiles),
        layer_backward=_spread(profile.layer_backward for profile in profiles),
        head=_spread(profile.head for profile in profiles),
        modules=modules,
        link={**link, **least},
        collective_gib_per_s=_mean(profile.collective_gib_per_s for profile in profiles),
        metrics=metrics,
        peak_allocated_bytes=max(peaks, default=None),
        grown_bytes=grown_bytes,
        grown_beyond_bytes={n: b - of_first.get(n, b) for n, b in grown_bytes.items()},
    )


def _merged(modules: Sequence[ProfiledModule]) -> ProfiledModule:
    return dataclasses.replace(
        modules[0],
        forward=_spread(module.forward for module in modules),
        backward=_spread(module.backward for module in modules),
        throughput_gib_per_s=_mean(module.throughput_gib_per_s for module in modules),
    )


def _spread(found: Iterable[Spread | None]) -> Spread | None:
    spreads = [spread for spread in found if spread is not None]
    if not spreads:
        return None
    return Spread(
        mean_ms=fmean(spread.mean_ms for spread in spreads),
        least_ms=min(spread.least_ms for spread in spreads),
        most_ms=max(spread.most_ms for spread in spreads),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return fmean(known) if known else None
