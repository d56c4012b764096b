"""What others measured on their GPUs, beside what ``pyao estimate`` says of the same training.

The configurations and figures are in ``published_gpus.json``, each with its source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.tools.estimate.card_memory import card_memory
from hf_pyao.tools.estimate.common_arguments import training_fields
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.ways import METHODS
from studies.published_rows import Row, Steps

TABLE = Path(__file__).with_suffix(".json")
CONTEXT_BYTES = int(0.49 * GIB)
"""What nvidia-smi shows beside what torch reserved: the context of an A100's process."""
TOLERANCE = 0.10
TIMES_TOLERANCE = 0.15
SLOW = "kernels there reach less than the rates assumed here, and short steps wait for the host"
FUSED = "fused kernels there; here each pointwise operation reads and writes memory"
NUM_PROCESSES = 3
Case = tuple[dict[str, Any], dict[str, Any], str]
"""A case, the configuration of its model, and its source."""


def gpus(steps: Steps, models: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each figure; *models* are those of other tables."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    found = [
        (each, table["models"][each["model"]], table["sources"][each["source"]])
        for each in table["cases"]
    ]
    alike = [list(each) for _, each in itertools.groupby(found, _trained)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for rows in pool.map(_rows_of, alike):
            yield from rows


def _trained(case: Case) -> str:
    """Return what one estimator takes: model, card, length and options."""
    values, model, _ = case
    return json.dumps([model, values["device"], values["length"], values.get("training", {})])


def _rows_of(cases: Sequence[Case]) -> list[Row]:
    return [row for case in cases for row in _rows(*case)]


def _rows(case: dict[str, Any], model: dict[str, Any], source: str) -> Iterator[Row]:
    """Yield the figure of a case, and its speed."""
    figure, way = case["figure"], METHODS[case["way"]]
    name = f"{case['name']}, {figure.replace('_per_', '/')}"
    row = functools.partial(Row, source=source, explanation=case.get("cause", ""))
    estimator = _estimator(_trained((case, model, source)))
    hardware = estimator.hardware
    if "memory_gib" in case:
        hardware = dataclasses.replace(hardware, memory_gib=case["memory_gib"])
    estimator.limit_bytes = card_memory(hardware).limit_bytes
    if figure == "longest":
        longest = estimator.longest_sequence(way)
        yield row(name, "tokens", case["published"], longest, tolerance=TOLERANCE)
        return
    found, _ = estimator.predicted(way, case["micro_batch"])
    tokens_per_s = case["micro_batch"] * case["length"] / found.step_ms * 1e3
    if figure != "tokens_per_s":
        beside = sum(
            each.nbytes for each in estimator.card_memory.beside if "BLAS" in each.name
        ) + CONTEXT_BYTES * (figure == "card")
        nbytes = found.memory.peak_bytes
        if figure != "allocated":
            nbytes = found.memory.reserved_within(estimator.limit_bytes)
        ours = (nbytes + beside) / 1e9
        yield row(name, "GB", case["published"] / 1e9, ours, tolerance=TOLERANCE)
    published = case["published"] if figure == "tokens_per_s" else case.get("tokens_per_s")
    if published is not None:
        kind = "fused" if case.get("is_fused") else "eager"
        yield row(
            *(f"{case['name']}, {kind} on {case['device']}", "tokens/s", published, tokens_per_s),
            explanation=FUSED if tokens_per_s < published else SLOW,
            tolerance=TIMES_TOLERANCE,
        )


@functools.lru_cache(maxsize=1)
def _estimator(trained: str) -> Estimator:
    model, device, length, options = json.loads(trained)
    hardware = find_hardware(device)
    fields = training_fields(hardware, **options)
    config = AutoConfig.for_model(**model)
    return Estimator(config, hardware, sequence_length=length, **fields)


def gpus_page(rows: Sequence[Row]) -> str:
    """Return the part of the page that holds these rows: those that are too low first.

    Longest sequences that are too long are memory that is too low.
    """
    low_first = sorted(rows, key=lambda row: row.difference * (-1) ** (row.unit == "tokens"))
    causes = list(dict.fromkeys(row.explanation for row in low_first if not row.is_within))
    sources = list(dict.fromkeys(row.source for row in rows))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    stated = tuple(f"{c['name']}, " for c in table["cases"] if c["group"] == "as stated")
    peaks = [row for row in rows if row.unit == "GB" and row.figure.startswith(stated)]
    num_low = sum(row.difference < -0.05 for row in peaks)
    lines = [
        f"Of {len(peaks)} peaks of configurations that `pyao estimate` can express "
        f"{sum(row.is_within for row in peaks)} are within {100 * TOLERANCE:.0f} %, "
        f"{sum(abs(row.difference) <= 0.05 for row in peaks)} within 5 %, and {num_low} too low by "
        "more than 5 %.\n"
    ]
    for title, unit in (("Memory", "GB"), ("Longest sequence", "tokens"), ("Speed", "tokens/s")):
        shown = [row for row in low_first if row.unit == unit]
        within = sum(row.is_within for row in shown)
        lines += [
            f"**{title}**: {within} of {len(shown)} within {100 * shown[0].tolerance:.0f} %.\n",
            f"| | published, {unit} | ours | difference | source | cause |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for row in shown:
            cause = "" if row.is_within else f"[{causes.index(row.explanation) + 1}]"
            digits = ".2f" if unit == "GB" else ",.0f"
            figures = (
                f"{row.published:{digits}} | {row.ours:{digits}} | {100 * row.difference:+.1f} %"
            )
            name = row.figure.removesuffix(", longest")
            lines.append(f"| {name} | {figures} | {sources.index(row.source) + 1} | {cause} |")
        lines.append("")
    lines += [f"- [{number}] {text}." for number, text in enumerate(causes, 1)]
    lines += ["", *(f"{number}. {text}." for number, text in enumerate(sources, 1))]
    return "\n".join(lines)
