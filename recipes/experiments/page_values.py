"""What page.md names in braces: tables, and numbers in its sentences, of the result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from experiments import published
from experiments.catalogue import EXPERIMENTS
from experiments.communication import COUNTINGS, find_engine
from experiments.experiment import Experiment
from experiments.neurocache import CONFIGURATIONS, FUSED
from experiments.overheads import COMPONENTS
from experiments.page import Cell, paper, pivot, source, table, table_of
from experiments.rows import MODES, OK, OUT_OF_MEMORY, RESULTS, one, read_document, select, values
from experiments.systems import (
    ACCUMULATION,
    AUTO,
    AUTO_CHUNKED,
    BASELINE,
    CHECKPOINTING,
    CHECKPOINTING_CHUNKED,
    GIVEN,
    LONG_CONTEXT,
    MODELS,
    OFFLOAD_ALL,
    OFFLOAD_ALL_INT8,
    PYAO,
    PYAO_CHUNKED,
    PYAO_INT8,
    System,
)
from experiments.time_to_target import SECONDS, SLOW, SPEEDUP
from hf_pyao.tools.estimate.model_sizes import PAPER_SIZES

MICRO_STEPS = 4
ESTIMATED = {
    BASELINE: "none",
    PYAO: "policy pyao",
    CHECKPOINTING: "checkpointing",
    PYAO_CHUNKED: "policy pyao + chunked loss",
    CHECKPOINTING_CHUNKED: "checkpointing + chunked loss",
    AUTO: "policy auto",
    AUTO_CHUNKED: "policy auto + chunked loss",
}
"""Systems of which ``pyao estimate`` has a row, by its name there."""
HOST_SHOWN = (BASELINE, CHECKPOINTING, PYAO, PYAO_INT8, PYAO_CHUNKED, AUTO, AUTO_CHUNKED)
SHORT = {PYAO.name: "PyAO", CHECKPOINTING.name: "checkpointing", ACCUMULATION.name: "ZeRO-1"}
MEASURED = {
    "memory": "held after forward, MiB",
    "throughput": "tokens/s",
    "pack time": "pack time, ms",
}
MODEL_LINES = {"model": "{model}", "micro-batch": "{micro_batch}"}
SYSTEM_LINES = {"": "{system}"}

Rows = Sequence[dict[str, Any]]


def known() -> dict[str, Any]:
    """Return all values by name; files, their source lines, titles and images by experiment."""
    file = {path.stem: read_document(path) for path in sorted(RESULTS.glob("*.json"))}
    of = {name: document["rows"] for name, document in file.items()}
    return {
        "file": file,
        "fit": file["communication_grid_miniature"],
        "source": {name: source(document) for name, document in file.items()},
        "title": {each.name: each.title for each in EXPERIMENTS},
        "images": {each.name: _images(each) for each in EXPERIMENTS},
        "modes": _modes(),
        "published": published,
        "micro_steps": MICRO_STEPS,
        "passes": {
            name: find_engine(name).passes(MICRO_STEPS) for name in ("zero2", "zero1", "ddp")
        },
        "throughputs": pivot(
            of["figure2_predict"],
            {"model": "{model}", "sub-module": "`{system}`"},
            lambda row: str(row["quantity"]).partition(", ")[2],
            lambda row: f"{row['value']:.1f}" + " flagged" * row["detail"]["is_flagged"],
        ),
        **_peaks(of["figure4_predict"]),
        "counted_peaks": pivot(
            [
                {**row, "shown": shown, "mb": row[key] if key == "value" else row["detail"][key]}
                for row in select(of["figure4_miniature"], micro_batch=8)
                for shown, key in (
                    ("held, MB", "value"),
                    ("left, MB", "offloaded_mb"),
                    ("on the link, MB", "link_mb"),
                )
            ],
            {"model": "{model}", "system": "{system}"},
            "{shown}",
            lambda row: f"{row['mb'] / (2 if 'link' in row['shown'] else 1):.2f}",
        ),
        **_host(of["figure5_predict"]),
        **_times(of["figure6_predict"]),
        **_components(of["table2_predict"]),
        **_grid(of["communication_grid_predict"]),
        **_neurocache(of),
        **{
            f"measured_{shown}": pivot(
                of[f"neurocache_{name}_miniature"],
                SYSTEM_LINES,
                lambda row: MEASURED[row["quantity"]],
                "{value:.1f} ± {detail[standard_deviation]:.1f}",
            )
            for shown, name in (("budgets", "table2"), ("validation", "validation"))
        },
        "modules": _modules(of["megatron_modules_predict"]),
        "counted_modules": pivot(
            of["megatron_modules_miniature"],
            SYSTEM_LINES,
            "{model}",
            lambda row: (
                f"−{row['value']:.1%} / {row['detail']['offloaded_mb']:.2f}"
                if row["value"]
                else "0"
            ),
        ),
        "inequality": _inequality(of["inequality_predict"]),
        "overlap": _overlap(of["zeroth_order_overlap_predict"]),
        **_compression(
            of["zeroth_order_compression_predict"], of["zeroth_order_compression_miniature"]
        ),
        "sizes": _sizes(of["zeroth_order_scaling_predict"]),
    }


def _files(experiment: Experiment, ending: str) -> dict[str, str]:
    """Return its files with this ending that are there, by mode, as the page links them."""
    names = {mode: f"{experiment.name}_{mode}{ending}" for mode in MODES}
    return {
        mode: f"../results/experiments/{name}"
        for mode, name in names.items()
        if (RESULTS / name).exists()
    }


def _images(experiment: Experiment) -> str:
    found = _files(experiment, ".png").items()
    return "\n\n".join(f"![{experiment.title}, {mode}]({path})" for mode, path in found)


def _modes() -> str:
    """Return the table of experiments and modes, with what was run and why some have none."""
    rows = []
    for experiment in EXPERIMENTS:
        found = _files(experiment, ".json")
        cells = [
            f"[result]({found[mode]})" if mode in found else f"none: {why}"
            for mode, why in experiment.modes.items()
        ]
        rows.append([f"`{experiment.name}`", *cells])
    return table(["experiment", *(f"`--{mode}`" for mode in MODES)], rows)


# ---- PyAO ----------------------------------------------------------------------------------------


def _with_papers(cell: str) -> Cell:
    in_brackets = paper(" (paper: {published:g})")
    return lambda row: (
        cell.format(**row) + " OOM" * (row["status"] == OUT_OF_MEMORY) + in_brackets(row)
    )


def _peaks(rows: Rows) -> dict[str, Any]:
    peaks, limits = (select(rows, unit=unit) for unit in ("GB", "samples"))
    at_4 = {"system": BASELINE.name, "micro_batch": 4}
    return {
        "peaks": pivot(peaks, MODEL_LINES, "{system}", _with_papers("{value:.2f}")),
        "limits": pivot(limits, SYSTEM_LINES, "{model}", _with_papers("{value:.0f}")),
        "estimated_limits": _estimated(limits),
        "auto_and_others": _auto(peaks),
        "llama_peak_gb": one(peaks, model=MODELS["llama"], **at_4)["value"],
        "gpt2_peak_gb": one(peaks, model=MODELS["gpt2"], **at_4)["published"],
    }


def _estimated(limits: Rows) -> str:
    """Return limits by the paper's rule and by that of ``pyao estimate``, from its result files."""
    methods = {system.name: method for system, method in ESTIMATED.items()}
    estimated = {}
    for model, name in MODELS.items():
        path = RESULTS.parent / f"estimate_{model}-{PAPER_SIZES[model]}_rtx4070.json"
        estimated[name] = json.loads(path.read_text(encoding="utf-8"))["rows"]

    def cell(row: dict[str, Any]) -> str:
        other = one(estimated[row["model"]], method=methods[row["system"]])
        return f"{row['value']:.0f} → {other['largest_micro_batch']}"

    shown = [row for row in limits if row["system"] in methods]
    head = "8.68 GB of tensors → `pyao estimate`"
    return pivot(shown, {head: "{system}"}, "{model}", cell)


def _auto(peaks: Rows) -> str:
    rows = []
    for name in MODELS.values():
        for auto in (AUTO, AUTO_CHUNKED):
            for row in select(peaks, model=name, system=auto.name):
                ours, oom = row["detail"]["step_ms"], " OOM" * (row["status"] == OUT_OF_MEMORY)
                cells = [name, auto.name, str(row["micro_batch"]), f"{ours:.1f}{oom}"]
                others = {
                    each["detail"]["step_ms"]: each["system"]
                    for each in reversed(fitting_others(peaks, row, auto.head_loss))
                }
                if others:
                    other = min(others)
                    cells += [others[other], f"{other:.1f}", f"{ours / other - 1:+.2%}"]
                rows.append(cells + ["–"] * (7 - len(cells)))
    heads = ["model", "system", "micro-batch", "ms", "fastest other", "its ms", "difference"]
    return table(heads, rows)


def fitting_others(peaks: Rows, row: dict[str, Any], head_loss: str) -> list[dict[str, Any]]:
    """Return the rows of other lossless systems with this loss that fit, at *row*'s point."""
    names = {
        system.name
        for system in GIVEN
        if system.codec == "identity" and system.head_loss == head_loss
    }
    found = select(peaks, model=row["model"], micro_batch=row["micro_batch"], unit="GB", status=OK)
    return [each for each in found if each["system"] in names]


def _host(rows: Rows) -> dict[str, Any]:
    names = [system.name for system in HOST_SHOWN]
    opt, gpt2 = (
        {row["system"]: row for row in select(rows, model=MODELS[model], micro_batch=micro_batch)}
        for model, micro_batch in (("opt", 8), ("gpt2", 4))
    )
    parts = [
        [part, "not in the text", *(f"{opt[name]['detail'][part]:.2f}" for name in names)]
        for part in opt[PYAO.name]["detail"]
    ]
    papers = published.HOST_PEAK_GB
    total = ["all", f"{papers:g}", *(f"{opt[name]['value']:.2f}" for name in names)]
    moved = gpt2[PYAO_INT8.name]["detail"]["activations"]
    plain = gpt2[BASELINE.name]["value"]
    return {
        "host_peaks": pivot(rows, MODEL_LINES, "{system}", _with_papers("{value:.2f}"), names),
        "host_parts": table(["", "paper", *names], [*parts, total]),
        "opt_host_gb": opt[PYAO.name]["value"],
        "host_ratio": gpt2[PYAO.name]["value"] / plain,
        "host_ratio_int8": gpt2[PYAO_INT8.name]["value"] / plain,
        "int8_activations_gb": moved,
        "needed_baseline_gb": moved / (published.HOST_RATIO - 1),
    }


def _times(rows: Rows) -> dict[str, Any]:
    def point(row: dict[str, Any]) -> tuple[str, ...]:
        return (row["model"], row["system"], row["detail"]["counting"], row["detail"]["speed"])

    seconds = {point(row): row["value"] for row in select(rows, quantity=SECONDS)}
    speedups = {point(row): row["value"] for row in select(rows, quantity=SPEEDUP)}
    shown = [
        {**row, "seconds": seconds[point(row)]}
        for row in select(rows, quantity=SPEEDUP)
        if row["detail"]["speed"] == "tensor cores"
    ]
    papers = paper("{published:g}")
    last = COUNTINGS[3].name
    small, large = published.MICRO_BATCHES["gpt2"]

    def of_models(system: System, speed: str = "tensor cores") -> dict[str, float]:
        return {name: speedups[name, system.name, last, speed] for name in MODELS.values()}

    return {
        "times": pivot(
            shown,
            {"model": "{model}", "system": "{system}"}
            | {"micro-batch": "{micro_batch}", "paper": papers},
            "{detail[counting]}",
            "{value:.2f} ({seconds:,.0f})",
        ),
        "speedups": {
            system.name: ", ".join(f"{value:.2f}" for value in of_models(system).values())
            for system in (CHECKPOINTING, PYAO_CHUNKED, AUTO, AUTO_CHUNKED, ACCUMULATION)
        },
        "int8_speedup": of_models(PYAO_INT8),
        "slow_speedup": of_models(PYAO_INT8, SLOW),
        "gpt2_ratio": large / small,
    }


def _components(rows: Rows) -> dict[str, Any]:
    def total(model: str, system: System, *parts: str) -> float:
        found = (one(rows, model=model, system=system.name, quantity=part) for part in parts)
        return sum(float(row["value"]) for row in found)

    def longer(system: System, other: System) -> str:
        """Say by how much a step of *system* is longer than one of *other*, for each model."""
        ratios = (
            total(name, system, "step") / total(name, other, "step") for name in MODELS.values()
        )
        return ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)

    def cell(row: dict[str, Any]) -> str:
        if row["quantity"] == "peak":
            return f"{row['detail']['peak_gb']:.2f}" + " OOM" * (not row["detail"]["fits"])
        return "–" if row["value"] is None else f"{row['value']:.1f}"

    steps = select(rows, quantity="step")
    waiting = (COMPONENTS[0], COMPONENTS[3])
    return {
        "components": pivot(
            [*rows, *({**step, "quantity": "peak"} for step in steps)],
            {"model": "{model}", "system": "{system}"},
            "{quantity}",
            cell,
        ),
        "all_slower": longer(OFFLOAD_ALL, PYAO),
        "all_slower_int8": longer(OFFLOAD_ALL_INT8, PYAO_INT8),
        "long_context_slower": longer(LONG_CONTEXT, CHECKPOINTING),
        "flagged": "; ".join(
            f"{step['model']}: {', '.join(step['detail']['recomputed']) or 'nothing'}"
            for step in select(steps, system=PYAO.name)
        ),
        "traded": ", ".join(
            f"{total(name, PYAO, COMPONENTS[5]):.1f} and "
            f"{total(name, OFFLOAD_ALL, *waiting) - total(name, PYAO, *waiting):.1f}"
            for name in MODELS.values()
        ),
    }


def _grid(rows: Rows) -> dict[str, Any]:
    def at(**wanted: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in rows
            if row["system"] in SHORT
            and all(row["detail"][key] in found for key, found in wanted.items())
        ]

    same, link = ("as it is",), "{detail[gbit_per_s]:g} Gbit/s"
    return {
        "grid": pivot(
            at(change=same), {"model": "{model}", "nodes": "{detail[nodes]}"}, link, "{value:.2f}"
        ),
        "changes": pivot(
            select(at(nodes=(5,), gbit_per_s=(1.0, 10.0)), model="OPT-1.3B"),
            {"": "{detail[change]}"},
            lambda row: f"{SHORT[row['system']]}, {link.format(**row)}",
            "{value:.2f}",
        ),
        "pyao_on_a_fast_link": one(
            at(change=same, nodes=(5,), gbit_per_s=(100.0,)), model="OPT-1.3B", system=PYAO.name
        )["value"],
    }


# ---- other papers --------------------------------------------------------------------------------


def _papers_table(rows: Rows) -> str:
    lines = []
    for system in values(rows, "system"):
        line = [system]
        for row in select(rows, system=system):
            mark = " OOM" * (row["status"] == OUT_OF_MEMORY)
            ours = "–" if row["value"] is None else f"{row['value']:.1f}{mark}"
            line += [paper("{published:g}")(row) or "not in it", ours]
        lines.append(line)
    return table(["", "its peak, MB", "ours, MiB", "its tokens/s", "ours"], lines)


def _neurocache(of: dict[str, Rows]) -> dict[str, Any]:
    peaks, by_budget = (
        {
            row["system"]: (row["value"], row["published"] or 0.0)
            for row in select(of[f"neurocache_{name}_predict"], unit="MiB")
        }
        for name in ("table1", "table2")
    )

    def less(first: tuple[float, float], then: tuple[float, float]) -> tuple[float, ...]:
        """Return by how much, ours and the paper's."""
        return first[0] - then[0], first[1] - then[1]

    plain, wide, narrow, five = (peaks[name] for name, *_ in CONFIGURATIONS)
    return {
        "configurations": _papers_table(of["neurocache_table1_predict"]),
        "budgets": _papers_table(of["neurocache_table2_predict"]),
        "validation": _papers_table(of["neurocache_validation_predict"]),
        "plain_mib": plain,
        "fused_mib": peaks[FUSED][0],
        "moments_mib": less(wide, narrow),
        "five_tensors_mib": less(narrow, five),
        "below": [1 - ours / papers for ours, papers in (wide, narrow)],
        "a_tensor_mib": less(by_budget["k = 0"], by_budget["k = 1"]),
    }


def _modules(rows: Rows) -> str:
    speeds = {
        (row["model"], row["system"]): row["value"]
        for row in select(rows, quantity="throughput, less")
    }

    def cell(row: dict[str, Any]) -> str:
        slower = speeds[row["model"], row["system"]]
        return f"−{row['value']:.1%} / −{slower:.1%}" if row["value"] or slower else "0"

    peaks = select(rows, quantity="peak device memory, less")
    return pivot(peaks, SYSTEM_LINES, "{model}", cell)


def _inequality(rows: Rows) -> str:
    def card(row: dict[str, Any]) -> str:
        return str(row["system"].rpartition(", ")[0])

    def column(row: dict[str, Any]) -> str:
        quantity = row["quantity"]
        if quantity.startswith("slowest"):
            return "needs, int8" if row["system"].endswith("int8") else "needs"
        if quantity.startswith("step on any"):
            return "checkpointing"
        return str(quantity.removeprefix("step with ").removesuffix(" over keeping all"))

    def cell(row: dict[str, Any]) -> str:
        if row["unit"] != "x":
            return f"{row['value']:.1f}"
        guide = row["detail"].get("guide")
        return f"{row['value']:.2f}" + ("" if guide is None else f" ({guide:.2f})")

    shown = [row for row in rows if row["model"] in MODELS.values()]
    return pivot(shown, {"model": "{model}", "card": card}, column, cell)


# ---- ZO2 -----------------------------------------------------------------------------------------


def _overlap(rows: Rows) -> str:
    steps = select(rows, quantity="step")

    def line(row: dict[str, Any]) -> list[str]:
        times, detail = row["system"].removeprefix("overlap, "), row["detail"]
        others = [
            one(steps, model=row["model"], system=f"{way}, {times}")["value"]
            for way in ("one slot", "no overlap")
        ]
        hidden = one(rows, model=row["model"], system=row["system"], unit="%")
        wholes = (row["value"], detail["busiest_lane_ms"], *others)
        return [
            *(row["model"], times, f"{detail['compute_ms']:.1f}", f"{detail['copy_ms']:.1f}"),
            *(f"{value:.0f}" for value in wholes),
            *(f"{hidden['value']:.1f}%", paper("{published:.0f}%")(hidden)),
        ]

    heads = ["model", "times", "compute", "copy", "step", "busiest lane", "one slot", "no overlap"]
    shown = [line(row) for row in steps if row["system"].startswith("overlap")]
    return table([*heads, "hidden", "published"], shown)


def _compression(predicted: Rows, small: Rows) -> dict[str, str]:
    host_ns = {
        row["system"]: row["value"]
        for row in select(small, quantity="update and packing on the host")
    }
    accuracy = {row["system"]: row["value"] for row in select(small, quantity="accuracy")}

    def on_host(row: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds of a step that the host takes for updates and packing, if any."""
        elements = row["detail"]["num_layers"] * row["detail"]["block_parameters"]
        seconds = elements * host_ns.get(row["system"], 0.0) * 1e-9
        return {**row, "quantity": "host", "value": seconds or None}

    def cell(row: dict[str, Any]) -> str:
        if row["value"] is None:
            return ""
        return f"{row['value']:.1f}" if row["quantity"] == "host" else f"{row['value']:.2f}"

    steps = select(predicted, quantity="step")
    return {
        "compression": pivot(
            [*predicted, *map(on_host, steps)],
            {"model": "{model}", "weights": "{system}"},
            "{quantity}",
            cell,
        ),
        "separable_task": table_of(
            select(small, quantity="loss at the end"),
            ("run", "{system}"),
            ("loss at the end", "{value:.4f}"),
            (
                "over seeds",
                lambda row: " to ".join(
                    f"{edge(row['detail']['by_seed']):.4f}" for edge in (min, max)
                ),
            ),
            ("accuracy, %", lambda row: f"{accuracy[row['system']]:.2f}"),
        ),
    }


def _sizes(rows: Rows) -> str:
    shown = {
        "device memory": ("device, GB", "{value:.2f}"),
        "host memory": ("host, GB", "{value:.2f}"),
        "throughput": ("tokens/s", "{value:.0f}"),
    }
    published_gb = {row["model"]: row for row in select(rows, quantity="device memory")}
    return pivot(
        [row for row in rows if row["quantity"] in shown],
        {
            "model": "{model}",
            "published, GB": lambda row: paper("{published:.2f}")(published_gb[row["model"]]),
        },
        lambda row: shown[row["quantity"]][0],
        lambda row: shown[row["quantity"]][1].format(**row),
    )
