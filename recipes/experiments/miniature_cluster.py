"""What ``recipes/local_cluster.py`` measured, as rows."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.cluster_result import KIND, SCHEMA_VERSION
from experiments.rows import Row
from hf_pyao.errors import ConfigError

NAMES = {"opt": "OPT", "gpt2": "GPT-2", "llama": "Llama"}


def read_sweeps(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Read result files of ``recipes/local_cluster.py``, by name.

    Raises:
        ConfigError: there are none, or one holds something else.
    """
    if not paths:
        raise ConfigError(
            "--miniature reads what recipes/local_cluster.py --result wrote: name the files with "
            "--sweeps."
        )
    return {path.name: _read(path) for path in paths}


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--sweeps names {str(path)!r}, which cannot be read: {error}") from error
    found = (document.get("kind"), document.get("schema_version"))
    if found != (KIND, SCHEMA_VERSION):
        raise ConfigError(
            f"--sweeps names {str(path)!r}, which holds {found[0]!r}, version {found[1]!r}; "
            f"expected {KIND!r}, version {SCHEMA_VERSION}."
        )
    return document


def speedups_of(name: str, sweep: dict[str, Any]) -> Iterator[Row]:
    """Yield the time to the target at each micro-batch over that at the smallest."""
    setup = sweep["setup"]
    groups: defaultdict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for point in sweep["points"]:
        key = point["architecture"], point["micro_batch"], point["gradient_accumulation"]
        groups[key].append(point)
    first: dict[str, float] = {}
    for (architecture, micro_batch, gas), runs in sorted(groups.items()):
        times = [run["target_s"] for run in runs if run["target_s"] is not None]
        if not times:
            continue
        target_s = statistics.median(times)
        sent = statistics.median(statistics.mean(run["tx_bytes_per_step"]) / gas for run in runs)
        yield Row(
            model=f"{NAMES[architecture]} {setup['model_size']}",
            system=f"{setup['engine']} {setup['precision']}"
            + " with hf_pyao" * setup["activation_offload"],
            micro_batch=micro_batch,
            quantity="speedup over the smallest micro-batch",
            unit="x",
            value=first.setdefault(architecture, target_s) / target_s,
            detail={
                "sweep": name,
                "target_s": target_s,
                "num_runs": len(times),
                "gas": gas,
                "tx_mb_per_micro_step": sent / 1e6,
                "rate_mbit": setup["rate_mbit"],
            },
        )
