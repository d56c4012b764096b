"""Fits the communication model to measured steps, and says how far off it is at others.

Fitted to points of one machine: the link's efficiency, and compute as
``fixed + per_sample x micro_batch`` for each engine and model. Points that are held out are
compared, never fitted. A point is one measured step, whatever wrote it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.communication import Cluster, StepTime, Work, find_engine, sent_bytes, step_time
from hf_pyao.errors import ConfigError

MOST_EFFICIENCY = 1448 / 1514
"""Payload of a full Ethernet frame by the bytes that ``tc`` counts of it: no link carries more.
What a fit finds beyond it is communication that passes under compute."""

LINK_BOUND = 0.85
"""Share of communication from which on a step is bound by the link."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured optimizer step."""

    engine: str
    num_nodes: int
    link_gbit_per_s: float
    micro_batch: int
    gradient_bytes: float
    step_s: float
    gas: int = 1
    workload: str = ""
    """What is computed: points of other models have other times."""
    name: str = ""
    """Where it is from."""

    @property
    def compute_key(self) -> str:
        """Points with the same key share what compute takes."""
        return f"{self.engine} {self.workload}".strip()


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted."""

    efficiency: float
    """Of the link."""
    overlap: float
    """Share of communication that passes under compute."""
    fixed_s: dict[str, float]
    """Compute of a micro-batch that no sample takes, by ``Point.compute_key``."""
    per_sample_s: dict[str, float]
    """Compute of one sample, likewise."""
    num_points: int

    def compute_s(self, key: str, micro_batch: int) -> float:
        """Return what a micro-batch takes; *key* is a ``Point.compute_key``.

        Raises:
            ConfigError: no point had this key.
        """
        if key not in self.fixed_s:
            raise ConfigError(
                f"no point of {key!r} was fitted; there are {', '.join(self.fixed_s)}."
            )
        return self.fixed_s[key] + self.per_sample_s[key] * micro_batch

    def predict_s(self, point: Point) -> float:
        """Return the step that the model expects where *point* was measured."""
        return self._time(point).step_s

    def communication_share(self, point: Point) -> float:
        """Return the share of communication that the model expects there."""
        return self._time(point).communication_share

    def _time(self, point: Point) -> StepTime:
        work = Work(
            gradient_bytes=point.gradient_bytes,
            compute_s=self.compute_s(point.compute_key, point.micro_batch),
            gas=point.gas,
        )
        cluster = Cluster(
            num_nodes=point.num_nodes,
            link_gbit_per_s=point.link_gbit_per_s,
            efficiency=self.efficiency,
            overlap=self.overlap,
        )
        return step_time(find_engine(point.engine), cluster, work)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A point that was not fitted, and what the model said."""

    point: Point
    predicted_s: float
    communication_share: float

    @property
    def error(self) -> float:
        """Of the prediction, over what was measured."""
        return self.predicted_s / self.point.step_s - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of several points."""

    num_points: int
    mean: float
    """Of the absolute relative errors."""
    largest: float


def calibrate(points: Sequence[Point]) -> Calibration:
    """Fit the model to *points*, each relative to its own step (least squares).

    Raises:
        ConfigError: there are too few points, or they do not tell link and compute apart.
    """
    import numpy as np

    keys = sorted({point.compute_key for point in points})
    num_unknown = 1 + 2 * len(keys)
    rows = []
    for point in points:
        sent = sent_bytes(
            find_engine(point.engine), point.num_nodes, point.gradient_bytes, point.gas
        )
        row = [0.0] * num_unknown
        row[0] = sent / (point.link_gbit_per_s * 1e9 / 8)
        at = 1 + 2 * keys.index(point.compute_key)
        row[at : at + 2] = [float(point.gas), float(point.gas * point.micro_batch)]
        rows.append([value / point.step_s for value in row])
    matrix, rank = np.array(rows), 0
    if len(points) >= num_unknown:
        found, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)
    if rank < num_unknown:
        raise ConfigError(
            f"{len(points)} points with workloads {', '.join(keys) or '(none)'} do not tell link "
            f"and compute apart; expected {num_unknown} or more, with two or more micro-batches "
            "for each and two or more link speeds or numbers of nodes."
        )
    if not found[0] > 0:
        raise ConfigError("the points are faster on slower links; check their link speeds.")
    seconds_per_ideal = float(found[0])
    return Calibration(
        efficiency=min(MOST_EFFICIENCY, 1 / seconds_per_ideal),
        overlap=max(0.0, 1 - seconds_per_ideal * MOST_EFFICIENCY),
        fixed_s={name: max(0.0, float(found[1 + 2 * n])) for n, name in enumerate(keys)},
        per_sample_s={name: max(0.0, float(found[2 + 2 * n])) for n, name in enumerate(keys)},
        num_points=len(points),
    )


def check(calibration: Calibration, points: Sequence[Point]) -> list[HeldOut]:
    """Compare the model with points that it was not fitted to."""
    return [
        HeldOut(
            point=point,
            predicted_s=calibration.predict_s(point),
            communication_share=calibration.communication_share(point),
        )
        for point in points
    ]


def errors_of(held_out: Sequence[HeldOut], *, is_link_bound: bool) -> Errors:
    """Return the errors of the points that are bound by the link, or of the others."""
    found = [
        abs(each.error)
        for each in held_out
        if (each.communication_share >= LINK_BOUND) == is_link_bound
    ]
    if not found:
        return Errors(num_points=0, mean=math.nan, largest=math.nan)
    return Errors(num_points=len(found), mean=sum(found) / len(found), largest=max(found))
