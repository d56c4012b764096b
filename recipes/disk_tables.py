"""Writes the tables of disk_tier.py and disk_activations.py into the pages: no number is typed.

    python recipes/disk_tables.py

The tables stand between two comments in `hf_pyao/engine/weights/README.md` and
`hf_pyao/engine/transfer/README.md`, with the command, the commit and the machine of the result.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from result_file import with_part

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "recipes" / "results"
BEGIN, END = "<!-- from {}: python recipes/disk_tables.py -->", "<!-- end of {} -->"
GIB, MIB = 2**30, 2**20


def main() -> int:
    """Write both pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(f"written to {page.relative_to(ROOT)}")
    return 0


def pages() -> dict[Path, str]:
    """Return both pages as they are to be."""
    written = {}
    for room, name, table in (
        ("weights", "disk_tier_weights.json", of_weights),
        ("transfer", "disk_activations.json", of_activations),
    ):
        page = ROOT / "hf_pyao" / "engine" / room / "README.md"
        found = json.loads((RESULTS / name).read_text())
        part = f"{_origin(found, name)}\n\n{table(found)}"
        begin, end = BEGIN.format(name), END.format(name)
        written[page] = with_part(page.read_text(), begin, end, part)
    return written


def _origin(found: dict[str, Any], name: str) -> str:
    """Return how and where the figures came about."""
    provenance = found["provenance"]
    host, commit = provenance["host"], provenance["commit"][:7]
    load = found.get("load_average")
    how = (
        "other processes ran beside it"
        if load is None
        else f"load average before and after: {load[0]:.1f} and {load[1]:.1f}"
    )
    return (
        f"`python recipes/{provenance['command']}` ([result](../../../recipes/results/{name}); "
        f"commit {commit}; {host['num_cores']} cores of an {host['processor']}, a CPU as the "
        f"device; {how}):"
    )


def of_activations(found: dict[str, Any]) -> str:
    """Return the table of saved tensors."""
    lines = [
        "| hidden size, layers | FLOPs a byte written | growth of resident memory, without and "
        "with | processor time of a step, without and with "
        "| time of a step, measured and predicted |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        plain, disk = row["plain"], row["disk"]
        grown = " and ".join(f"{arm['grown_bytes'] / GIB:.2f}" for arm in (plain, disk))
        cpu = " and ".join(f"{arm['cpu_ms'] / 1e3:.0f}" for arm in (plain, disk))
        step = f"{row['step_ratio']:.2f}x"
        if row["step_ratio"] > 1.25:
            step = f"**{step}**"
        lines.append(
            f"| {row['hidden_size']}, {row.get('num_layers', 8)} | {row['flops_per_byte']:.0f} "
            f"| {grown} GiB ({100 * row['growth_ratio'] - 100:.0f} %) | {cpu} s "
            f"| {step}, {row['predicted_step_ratio']:.2f}x |"
        )
    return "\n".join(lines)


def of_weights(found: dict[str, Any]) -> str:
    """Return the table of weights, and how fast they were read."""
    limited, resident = found["limited"], found["resident"]
    own, other = (max(each["RssAnon"] for each in arm["memory"]) for arm in (limited, resident))
    mapped = max(each["RssFile"] for each in resident["memory"])
    equal = "equal" if found["bits_are_equal"] else "**differ**"
    charged = (
        f"{found['charged_peak_bytes'] / GIB:.2f} GiB of {found['limit_bytes'] / GIB:.2f}, "
        f"{found['killed'] or 'nothing'} killed"
        if found["has_cgroup"]
        else "no cgroup could be made"
    )
    rows = [
        ("what", "from the disk", "resident, without the limit"),
        ("---", "---", "---"),
        ("bits of the losses and of the adapters", equal, equal),
        ("charged by the kernel, at most", charged, "no limit"),
        (
            "own memory of the process (RssAnon)",
            f"{own / GIB:.2f} GiB",
            f"{other / GIB:.2f} GiB, and {mapped / GIB:.2f} GiB of mapped files",
        ),
        (
            "O_DIRECT, by the descriptor's flags",
            f"{'in force' if limited['is_direct'] else '**no**'}; "
            f"{limited['cached_bytes_of_file']} bytes of the file in the page cache",
            "-",
        ),
        ("read a step", f"{limited['read_bytes_per_step'] / GIB:.2f} GiB", "0"),
        ("memory in flight", f"{limited['staging_bytes'] / MIB:.0f} MiB", "-"),
        ("checksums, of threads", f"{limited['check_s_per_gib']:.2f} s a GiB", "-"),
        ("time of a step", f"{limited['step_s']:.1f} s", f"{resident['step_s']:.1f} s"),
    ]
    shares = [each["ring_gib_per_s"] / each["raw_gib_per_s"] for each in limited["rounds"]]
    raw = statistics.median(each["raw_gib_per_s"] for each in limited["rounds"])
    of_what = ", of another file"
    if found["schema_version"] > 1:
        used = statistics.median(each["ring_cpu_s_per_gib"] for each in limited["rounds"])
        of_what = f"; the ring takes {used:.2f} s of processor time for each GiB, compute included"
    speed = (
        f"Weights of {found['weights_bytes'] / GIB:.2f} GiB, "
        f"{found['weights_bytes'] / found['limit_bytes']:.2f} x the limit. Of the raw speed, in "
        f"{len(shares)} rounds: median {_percent(statistics.median(shares))} (least "
        f"{_percent(min(shares))}, most {_percent(max(shares))}; raw {raw:.2f} GiB/s{of_what})."
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{speed}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
