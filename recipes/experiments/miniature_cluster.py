"""What ``recipes/local_cluster.py`` measured, as rows and as points for the communication model."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cluster_result import KIND, SCHEMA_VERSION
from experiments.calibration import Point
from experiments.rows import Row
from hf_pyao.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One result file."""

    name: str
    setup: dict[str, Any]
    points: list[dict[str, Any]]


def read_sweeps(paths: Sequence[Path]) -> list[Sweep]:
    """Read result files of ``recipes/local_cluster.py``.

    Raises:
        ConfigError: there are none, or one holds something else.
    """
    if not paths:
        raise ConfigError(
            "--miniature reads what recipes/local_cluster.py --result wrote: name the files with "
            "--sweeps."
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Sweep:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--sweeps names {str(path)!r}, which cannot be read: {error}") from error
    found = (document.get("kind"), document.get("schema_version"))
    if found != (KIND, SCHEMA_VERSION):
        raise ConfigError(
            f"--sweeps names {str(path)!r}, which holds {found[0]!r}, version {found[1]!r}; "
            f"expected {KIND!r}, version {SCHEMA_VERSION}."
        )
    return Sweep(name=path.name, setup=document["setup"], points=document["points"])


def steady_s(point: dict[str, Any]) -> float:
    """Return the median seconds of a step, the first one left out."""
    return float(statistics.median(point["step_s"][1:] or point["step_s"]))


def groups_of(sweep: Sweep) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """Return the runs of each (architecture, micro-batch, accumulation)."""
    groups: defaultdict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for point in sweep.points:
        groups[point["architecture"], point["micro_batch"], point["gradient_accumulation"]].append(
            point
        )
    return dict(sorted(groups.items()))


def points_of(sweeps: Iterable[Sweep]) -> Iterator[tuple[Point, bool]]:
    """Yield the median step of each group, and whether its link was shaped.

    A step with the links unshaped, less what its collectives take alone, is one over a link of
    endless speed: compute.
    """
    for sweep in sweeps:
        for (architecture, micro_batch, gas), runs in groups_of(sweep).items():
            setup = sweep.setup
            common: dict[str, Any] = {
                "engine": setup["engine"],
                "num_nodes": setup["nodes"],
                "micro_batch": micro_batch,
                "gas": gas,
                "gradient_bytes": float(runs[0]["gradient_bytes"]),
                # All nodes share one machine's cores, so that their number changes compute.
                "workload": f"{architecture} {setup['model_size']} {setup['precision']}, "
                f"{setup['nodes']} nodes",
                "name": sweep.name,
            }
            rate = setup["rate_mbit"] / 1e3
            step_s = statistics.median(steady_s(run) for run in runs)
            yield Point(**common, link_gbit_per_s=rate, step_s=step_s), True
            unshaped = [
                statistics.median(run["compute_step_s"]) - statistics.median(run["collectives_s"])
                for run in runs
                if run["compute_step_s"]
            ]
            if unshaped:
                compute_s = statistics.median(unshaped)
                yield Point(**common, link_gbit_per_s=math.inf, step_s=compute_s), False


def speedups_of(sweep: Sweep) -> Iterator[Row]:
    """Yield the time to the target at each micro-batch over that at the smallest."""
    names = {"opt": "OPT", "gpt2": "GPT-2", "llama": "Llama"}
    first: dict[str, float] = {}
    for (architecture, micro_batch, gas), runs in groups_of(sweep).items():
        times = [run["target_s"] for run in runs if run["target_s"] is not None]
        if not times:
            continue
        target_s = statistics.median(times)
        sent = statistics.median(statistics.mean(run["tx_bytes_per_step"]) / gas for run in runs)
        yield Row(
            model=f"{names[architecture]} {sweep.setup['model_size']}",
            system=f"{sweep.setup['engine']} {sweep.setup['precision']}"
            + (" with hf_pyao" if sweep.setup["activation_offload"] else ""),
            micro_batch=micro_batch,
            quantity="speedup over the smallest micro-batch",
            unit="x",
            value=first.setdefault(architecture, target_s) / target_s,
            detail={
                "sweep": sweep.name,
                "target_s": target_s,
                "num_runs": len(times),
                "gas": gas,
                "tx_mb_per_micro_step": sent / 1e6,
                "rate_mbit": sweep.setup["rate_mbit"],
            },
        )
