"""What fits on which card: README's first tables, as ``pyao estimate`` says.

    python recipes/studies/cards.py            # half an hour on one core; cells are kept
    python recipes/studies/cards.py --smoke    # a tiny model on one card, without writing

Each cell is a part of ``pyao estimate``: five ways to train one model on one card, 2,048 tokens.
Nothing is trained, and no GPU is needed. Rows are kept in ``outputs/cards``; a second run makes
those that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_pyao.cli import make_parser
from hf_pyao.plan.documents.provenance import collect_provenance
from hf_pyao.tools.estimate.common_arguments import hardware_of, training_fields_of
from hf_pyao.tools.estimate.estimate import Estimator
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.ways import METHODS
from result_file import with_part, write_result

SCHEMA_VERSION = 2
REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
RESULT = REPOSITORY / "recipes" / "results" / "cards.json"
MARKS = ("<!-- cards: python recipes/studies/cards.py -->", "<!-- end of cards -->")
SEQUENCE_LENGTH = 2048

CARDS = {
    "8 GB": ("rtx4070", "--device-memory", "8GiB"),
    "12 GB (RTX 4070)": ("rtx4070",),
    "24 GB (RTX 4090)": ("rtx4090",),
    "80 GB (H100)": ("h100",),
}
MODELS = {
    "Llama 1.2B": ("llama:1.2b",),
    "Llama 8B, LoRA": ("llama:8b", "--lora"),
    "Llama 8B": ("llama:8b",),
}
CHUNKED = "checkpointing + chunked loss"
OTHERS = ("none", "checkpointing", CHUNKED)
"""Rows of an estimate that are compared with: other libraries have chunked losses too."""
OURS = ("policy auto, streamed weights + chunked loss", "long context")
"""Rows that take most; the first with adapters alone."""
HOSTS_GB = (32, 64, 128)
"""Host memory that cells are computed for, in 1e9 bytes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one card: the largest micro-batch of each way, in samples of 2,048 tokens.

    ``none``, ``checkpointing``, ``chunked``: without hf_pyao.
    """

    card: str
    model: str
    command: str
    none: int
    checkpointing: int
    chunked: int
    largest: int
    way: str
    host_gb: float
    """Host memory at the largest: what is offloaded, and masters of streamed weights."""
    speed: float | None
    """Tokens per second at the largest, over those of checkpointing, with the chunked loss where it
    does not fit without; None where neither fits."""
    within_hosts: tuple[int, ...]
    """At least so many within each of :data:`HOSTS_GB`: host memory grows with the samples."""

    @property
    def text(self) -> str:
        sizes = (self.none, self.checkpointing, self.chunked, self.largest)
        text = " → ".join(f"{value:,}" if value else "–" for value in sizes)
        speed = "" if self.speed is None else f", {self.speed:.2f}x"
        return f"{text} ({self.host_gb:.0f} GB{speed})" if self.largest else text


def cell_of(card: str, model: str, rows: dict[str, dict[str, Any]], command: str) -> Cell:
    """Take one cell from rows by their names."""
    largest = {name: int(row["largest"]) for name, row in rows.items()}
    ours = {name: row for name, row in rows.items() if name in OURS}
    way = max(ours, key=lambda name: largest[name])
    fitting = [rows[name] for name in OTHERS[1:] if largest[name]]
    speed = rows[way]["tokens_per_s"] / fitting[0]["tokens_per_s"] if fitting else None
    hosts = tuple(max(_within(row, size * 1e9) for row in ours.values()) for size in HOSTS_GB)
    host_gb = (rows[way]["saved_bytes"] + rows[way]["weights_bytes"]) / 1e9
    none, checkpointing, chunked = (largest[name] for name in OTHERS)
    return Cell(
        card=card,
        model=model,
        command=command,
        none=none,
        checkpointing=checkpointing,
        chunked=chunked,
        largest=largest[way],
        way=way,
        host_gb=host_gb,
        speed=speed,
        within_hosts=hosts,
    )


def _within(row: dict[str, Any], host_bytes: float) -> int:
    """Return how many samples a row's way has at least where the host has *host_bytes*."""
    most, left_bytes = int(row["largest"]), host_bytes - row["weights_bytes"]
    if left_bytes < 0 or not row["saved_bytes"]:
        return 0 if left_bytes < 0 else most
    return int(min(most, left_bytes * most / row["saved_bytes"]))


def rows_of(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return ways by name: the largest micro-batch, host memory and speed there."""
    args = make_parser().parse_args(["estimate", *arguments])
    hardware = hardware_of(args)
    estimator = Estimator(
        config_of(parse_model(args.model)),
        hardware,
        sequence_length=args.sequence_length,
        **training_fields_of(args, hardware),
    )
    names = [*OTHERS, *OURS[args.lora is None :]]
    return {name: _row(estimator, name) for name in names}


def _row(estimator: Estimator, name: str) -> dict[str, Any]:
    way = METHODS[name]
    largest = estimator.largest_micro_batch(way, estimator.allocator)
    if not largest:
        return {"largest": 0, "saved_bytes": 0, "weights_bytes": 0, "tokens_per_s": 0.0}
    found, weights = estimator.predicted(way, largest)
    weights_bytes = 0 if weights is None else weights.host_bytes
    return {
        "largest": largest,
        "saved_bytes": found.host_bytes - weights_bytes,
        "weights_bytes": weights_bytes,
        "tokens_per_s": largest * estimator.sequence_length / found.step_ms * 1e3,
    }


def kept(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what *path* holds, after making it where it is missing: rows, and the commit."""
    if not path.exists():
        made = {"rows": rows_of(arguments), "commit": collect_provenance().commit}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made), encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(cells: Sequence[Cell], commit: str) -> str:
    """Return the table and its caption, as README has them."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    lines = [f"| | {' | '.join(models)} |", "|---" + "|--:" * len(models) + "|"]
    cards = list(dict.fromkeys(cell.card for cell in cells))
    for card in cards:
        texts = [cell.text for cell in cells if cell.card == card]
        lines.append(f"| {card} | {' | '.join(texts)} |")
    hosts = " / ".join(map(str, HOSTS_GB))
    lines += [
        "",
        "*Most sequences of 2,048 tokens in a micro-batch: without anything → with gradient "
        "checkpointing → with a chunked loss beside it, which other libraries have too → with the "
        "setting of hf_pyao that takes most (LoRA on up to 24 GB: streamed weights and the chunked "
        "loss; else `long_context`), in brackets the host memory that it takes, and its tokens per "
        "second over those of checkpointing; –: not one fits. The most are rarely the fastest. "
        "bf16, flash attention (torch's own choice on an H100 is cuDNN's), AdamW with 16-bit "
        "states, or LoRA of rank 16 with states in float32. Estimated. Commit "
        f"`{commit[:7]}`, [each cell](recipes/results/cards.json).*",
        "",
        f"| host of {hosts} GB | {' | '.join(models)} |",
        "|---" + "|--:" * len(models) + "|",
    ]
    for card in cards:
        found = [cell.within_hosts for cell in cells if cell.card == card]
        texts = [" / ".join(f"{each:,}" if each else "–" for each in sizes) for sizes in found]
        lines.append(f"| {card} | {' | '.join(texts)} |")
    lines += ["", "*The last number where the host has no more: at least so many.*"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the estimates, the result file, and README's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model; print, write nothing")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/cards"),
        help="keeps the estimates (%(default)s)",
    )
    options = parser.parse_args(argv)
    cards = dict(list(CARDS.items())[:1]) if options.smoke else CARDS
    models = {"Llama tiny": ("llama:tiny",)} if options.smoke else MODELS
    length = 64 if options.smoke else SEQUENCE_LENGTH
    cells = []
    for card, model in tqdm([(c, m) for c in cards for m in models], unit="estimate"):
        arguments = ["--model", *models[model], "--device", *cards[card]]
        arguments += ["--sequence-length", str(length), "--no-longest-sequence"]
        path = options.folder / f"{model} on {card}.json".replace(" ", "_")
        found = kept(path, arguments)
        cells.append(cell_of(card, model, found["rows"], f"pyao estimate {' '.join(arguments)}"))
        commit = str(found["commit"])
    print(text := table(cells, commit))
    if not options.smoke:
        write_result(RESULT, kind="cards", schema_version=SCHEMA_VERSION, cells=cells)
        page = with_part(README.read_text(encoding="utf-8"), *MARKS, text)
        README.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
