"""Documents for these tests, their figures made up."""

from __future__ import annotations

from typing import Any

from hf_pyao.plan.documents.bench import (
    OUT_OF_MEMORY,
    UNAVAILABLE,
    BenchReport,
    BenchRow,
    FactsReport,
    StepTimes,
)
from hf_pyao.plan.documents.microbatch import MicroBatchReport, MicroBatchRow
from hf_pyao.plan.documents.plan import Plan, PlannedSlot
from hf_pyao.plan.documents.provenance import Provenance
from hf_pyao.plan.documents.run import RunReport
from hf_pyao.plan.documents.step import MemoryPoint, StepPeak, StepReport, StepSpan, StepTotals

GIB = 2**30
MIB = 2**20

PROVENANCE = Provenance(
    command="bench_offload.py --model opt:1.3b",
    created_at="2026-01-02T03:04:05+00:00",
    commit="0123456789abcdef0123",
    is_dirty=False,
    source_sha256="feedbeef",
    versions={"python": "3.12.3", "torch": "2.11.0", "trl": None},
    host={"system": "Linux x86_64", "processor": "Some CPU", "num_cores": 16, "memory_gib": 128.0},
)


def make_row(method: str, median_ms: float, peak_gib: float | None, **changes: Any) -> BenchRow:
    """Return a measured row."""
    times_ms = [median_ms - 1, median_ms, median_ms + 3]
    fields: dict[str, Any] = {
        "method": method,
        "label": f"the method {method}",
        "micro_batch": 4,
        "step": StepTimes.of(times_ms, num_warmup=2),
        "tokens_per_s": 4 * 512 / median_ms * 1e3,
        "peak_allocated_bytes": None if peak_gib is None else int(peak_gib * GIB),
        "rss_growth_bytes": GIB // 4,
        "loss": 10.5,
        "gradient_digest": "aaaa",
    }
    return BenchRow(**{**fields, **changes})


def make_bench(rows: list[BenchRow] | None = None) -> BenchReport:
    """Return a benchmark on a device: one row of each outcome, the losing ones included."""
    if rows is None:
        rows = [
            make_row("none", 100.0, 8.0),
            make_row("pyao-window", 104.0, 5.0),
            make_row("checkpoint", 131.0, 5.1),
            make_row("trl-streams", 126.0, 6.0, gradient_digest="bbbb"),
            BenchRow(
                method="save-on-cpu",
                label="torch save_on_cpu",
                micro_batch=4,
                status=OUT_OF_MEMORY,
                reason="CUDA out of memory | tried 1 GiB",
            ),
            BenchRow(
                method="deepspeed",
                label="DeepSpeed",
                micro_batch=4,
                status=UNAVAILABLE,
                reason="DeepSpeed is not installed",
            ),
        ]
    return BenchReport(
        title="opt 1.3b, micro-batch 4 x 512 tokens, bfloat16",
        setup={"seed": 0, "gradients": "keep"},
        device={"device": "cuda:0", "name": "Some GPU", "memory_gib": 12.0, "driver": "580.1"},
        link={"d2h_gib_per_s": 24.0, "h2d_gib_per_s": 25.0, "both_gib_per_s": 40.0},
        provenance=PROVENANCE,
        rows=[],
    ).with_rows(rows)


def make_run(**changes: Any) -> RunReport:
    """Return the report of a run of two micro-batches."""
    last = {
        "would_hold_bytes": 10 * MIB,
        "held_bytes": 2 * MIB,
        "offloaded_bytes": 8 * MIB,
        "reloaded_bytes": 8 * MIB,
        "recomputed_bytes": 0,
        "link_bytes": 16 * MIB,
        "stall_forward_ms": 1.0,
        "stall_backward_ms": 3.0,
        "transfer_ms": 40.0,
        "overlap_efficiency": 0.9,
        "kept_bytes/last layer": 2 * MIB,
    }
    totals = {key: 2 * value for key, value in last.items()}
    totals.update(overlap_efficiency=0.9, num_micro_batches=2, pool_bytes=32 * MIB)
    fields: dict[str, Any] = {
        "written_at": "2026-01-02T03:04:05+00:00",
        "description": "hf_pyao offloads <everything>",
        "policy": "all",
        "config": {"policy": "all"},
        "device": "cuda:0",
        "layer_names": ["layers.0", "layers.1"],
        "totals": totals,
        "last_micro_batch": last,
        "link": {"d2h_gib_per_s": 20.0, "h2d_gib_per_s": None},
        "versions": PROVENANCE.versions,
        "provenance": PROVENANCE,
    }
    return RunReport(**{**fields, **changes})


def make_facts() -> FactsReport:
    """Return a few facts."""
    return FactsReport(
        title="Tests on the device",
        facts={"outcome": "passed", "num_passed": 78, "wall_s": 61.25, "failures": []},
        provenance=PROVENANCE,
    )


def make_step(**changes: Any) -> StepReport:
    """Return a step of two layers, of which the first is copied and waited for."""
    spans = [
        ("outside", "outside of layers, forward", 0, 1),
        ("forward", "layers.0", 1, 3),
        ("offload", "layers.0 mlp:0", 3, 6),
        ("stall", "layers.0 mlp:0", 3, 4),
        ("forward", "layers.1", 4, 6),
        ("backward", "layers.1", 6, 10),
        ("reload", "layers.0 mlp:0", 6, 9),
        ("backward", "layers.0", 10, 14),
    ]
    sizes = [(0, 2), (1, 3), (4, 5), (6, 6), (10, 4), (14, 2)]
    fields: dict[str, Any] = {
        "title": "One step of opt 1.3b",
        "is_measured": False,
        "setup": {"method": "policy all"},
        "device": "rtx4070",
        "memory": [MemoryPoint(time_ms=ms, nbytes=size * GIB) for ms, size in sizes],
        "limit_bytes": 8 * GIB,
        "peak": StepPeak(
            time_ms=6.0,
            nbytes=6 * GIB,
            phase="backward",
            where="layers.1",
            tensor="layers.1 mlp:0",
            tensor_bytes=GIB,
            next_peak_bytes=5 * GIB,
        ),
        "spans": [
            StepSpan(lane=lane, label=label, start_ms=start, end_ms=end)
            for lane, label, start, end in spans
        ],
        "totals": StepTotals(
            step_ms=14.0, compute_ms=13.0, stall_forward_ms=1.0, stall_backward_ms=0.0
        ),
        "provenance": PROVENANCE,
    }
    return StepReport(**{**fields, **changes})


def make_plan(**changes: Any) -> Plan:
    """Return a plan with a slot of each action."""
    fields: dict[str, Any] = {
        "model": {"num_layers": 24},
        "slots": [
            PlannedSlot(name="attn:0", action="offload", nbytes=8 * MIB, codec="fp8", reason="big"),
            PlannedSlot(name="act:0", action="recompute", nbytes=4 * MIB, layers=[0, 1, 2, 5]),
            PlannedSlot(name="norm:0", action="keep", nbytes=MIB),
        ],
        "recomputed_modules": ["mlp"],
        "figures": {"link_gib_per_s": 24.0},
    }
    return Plan(**{**fields, **changes})


def make_microbatch(**changes: Any) -> MicroBatchReport:
    """Return a choice among four sizes, of which the largest does not fit."""
    rows = [
        MicroBatchRow(
            micro_batch=size,
            sequence_length=512,
            accumulation=8 // size,
            fits=fits,
            peak_bytes=peak * GIB,
            step_ms=step_ms,
            plan=plan,
        )
        for size, fits, peak, step_ms, plan in (
            (1, True, 6, 30.0, "keep everything"),
            (2, True, 8, 50.0, "keep everything"),
            (4, True, 9, 110.0, "planned"),
            (8, False, 14, None, "planned"),
        )
    ]
    fields: dict[str, Any] = {
        "title": "Fastest micro-batch: opt 1.3b on rtx4070",
        "find": "fastest",
        "global_batch": 8,
        "limit_bytes": 11 * GIB,
        "chosen": rows[1],
        "verdict": "Fastest: micro-batch 2 accumulated 4 times.",
        "setup": {"engine": "plain"},
        "hardware": {"name": "rtx4070"},
        "assumptions": ["eager layers"],
        "provenance": PROVENANCE,
        "rows": rows,
    }
    return MicroBatchReport(**{**fields, **changes})
