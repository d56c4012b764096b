"""What fits on which card: README's first table, from ``pyao estimate``.

    python recipes/studies/cards.py            # four minutes on two cores; estimates are kept
    python recipes/studies/cards.py --smoke    # a tiny model on one card, without writing

Each cell is one run of ``pyao estimate``: one model on one card, 2,048 tokens. Nothing is trained,
and no GPU is needed. The estimates are kept in ``outputs/cards``; a second run makes those that are
missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import with_part, write_result

SCHEMA_VERSION = 1
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
BARE = ("none", "checkpointing")
"""Rows of an estimate that need no hf_pyao."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one card: the largest micro-batch of each way, in samples of 2,048 tokens."""

    card: str
    model: str
    command: str
    none: int
    checkpointing: int
    largest: int
    way: str

    @property
    def text(self) -> str:
        return " → ".join(
            f"{value:,}" if value else "–"
            for value in (self.none, self.checkpointing, self.largest)
        )


def cell_of(card: str, model: str, estimate: dict[str, Any], command: str) -> Cell:
    """Take one cell from the JSON of ``pyao estimate``."""
    largest = {row["method"]: int(row["largest_micro_batch"]) for row in estimate["rows"]}
    ours = {name: value for name, value in largest.items() if not name.startswith(BARE)}
    way = max(ours, key=lambda name: ours[name])
    none, checkpointing = (largest[name] for name in BARE)
    return Cell(card, model, command, none, checkpointing, ours[way], way)


def estimate_of(arguments: Sequence[str], path: Path) -> dict[str, Any]:
    """Return the estimate that *path* holds, after making it where it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "hf_pyao.cli", "estimate", *arguments]
        subprocess.run(
            [*command, "--output", str(path)], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(cells: Sequence[Cell], commit: str) -> str:
    """Return the table and its caption, as README has them."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    lines = [f"| | {' | '.join(models)} |", "|---" + "|--:" * len(models) + "|"]
    for card in dict.fromkeys(cell.card for cell in cells):
        texts = [cell.text for cell in cells if cell.card == card]
        lines.append(f"| {card} | {' | '.join(texts)} |")
    return "\n".join(lines) + (
        "\n\n*Most sequences of 2,048 tokens in a micro-batch: without anything → with gradient "
        "checkpointing → with the setting of hf_pyao that takes most (LoRA on up to 12 GB: "
        "streamed weights and the chunked loss; else `long_context`); –: not one fits. The "
        "most are rarely the fastest. bf16, AdamW with 16-bit states, or LoRA of rank 16. "
        f"Estimated. Commit `{commit[:7]}`, [each cell](recipes/results/cards.json).*"
    )


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
        estimate = estimate_of(arguments, path.resolve())
        cells.append(cell_of(card, model, estimate, f"pyao estimate {' '.join(arguments)}"))
        commit = str(estimate["provenance"]["commit"])
    print(text := table(cells, commit))
    if not options.smoke:
        write_result(RESULT, kind="cards", schema_version=SCHEMA_VERSION, cells=cells)
        page = with_part(README.read_text(encoding="utf-8"), *MARKS, text)
        README.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
