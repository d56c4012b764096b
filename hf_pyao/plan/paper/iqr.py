"""PyAO's rule for what to recompute: outliers of activation throughput (PyAO paper, section 4.4).

A sub-module whose throughput (bytes that it saves over the time in which it makes them) is an
outlier among those of its layer, and above what the link carries, is recomputed instead of
offloaded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from hf_pyao.errors import ConfigError

WHISKER = 1.5
"""Interquartile ranges above the upper quartile at which outliers begin."""


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """What the rule flags, and by which bounds."""

    flagged: tuple[str, ...]
    """Sub-modules above both bounds, the highest throughput first."""
    upper_bound_gib_per_s: float
    """Q3 + 1.5 IQR of the sub-modules' throughputs."""
    link_gib_per_s: float
    """Mean bandwidth of the link."""
    throughput_gib_per_s: Mapping[str, float]
    """Of each sub-module."""


def find_outliers(throughput_gib_per_s: Mapping[str, float], link_gib_per_s: float) -> Outliers:
    """Return the sub-modules whose throughput is an outlier and above the link's bandwidth.

    Quartiles are those of the data, with linear interpolation.

    Args:
        throughput_gib_per_s: of each sub-module that saves anything.
        link_gib_per_s: mean bandwidth of the link over the nodes.

    Raises:
        ConfigError: a throughput or the bandwidth is negative or no number.
    """
    for name, value in [*throughput_gib_per_s.items(), ("the link", link_gib_per_s)]:
        if not value >= 0 or math.isinf(value):
            raise ConfigError(
                f"the throughput of {name or 'the layer itself'} is {value} GiB/s; expected 0 or "
                "more.",
                key="wrong-argument",
            )
    values = list(throughput_gib_per_s.values())
    if len(values) < 2:
        bound = math.inf
    else:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        bound = upper + WHISKER * (upper - lower)
    flagged = [
        name
        for name, value in throughput_gib_per_s.items()
        if value > bound and value > link_gib_per_s
    ]
    flagged.sort(key=lambda name: -throughput_gib_per_s[name])
    return Outliers(
        flagged=tuple(flagged),
        upper_bound_gib_per_s=bound,
        link_gib_per_s=link_gib_per_s,
        throughput_gib_per_s=dict(throughput_gib_per_s),
    )
