"""Text for the recipes: where it comes from, its tokens, and the blocks that a model is trained on.

Nothing here needs the `datasets` library unless a hub dataset is asked for.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_pyao.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    import numpy.typing as npt

MIB = 2**20
LIBRARY_MIB = 2.0
"""How much of the standard library is read unless told otherwise."""
HUB_MIB = 16.0
"""How much of a hub dataset is read unless told otherwise."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts, in a fixed order."""

    documents: tuple[str, ...]
    """Files of a folder, rows of a dataset, or one text."""
    name: str
    """What they are, for messages."""


def standard_library(max_mib: float = LIBRARY_MIB, folder: Path | None = None) -> Corpus:
    """Return sources of this Python's standard library, the same ones at every call.

    Modules come before packages, each in the order of their names; tests are left out.

    Args:
        max_mib: where to stop, in MiB (2**20 bytes).
        folder: the library's folder; None for this Python's.

    Raises:
        ConfigError: this Python has no sources (some embedded ones have not).
    """
    folder = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    documents = tuple(_take(_read_sources(folder), max_mib))
    if not documents:
        raise ConfigError(
            f"this Python has no standard-library sources in {str(folder)!r}. "
            "Name a text of yours with --train_file."
        )
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(
        documents=documents,
        name=f"{len(documents)} sources of Python {version}'s standard library",
    )


def _read_sources(folder: Path) -> Iterator[str]:
    paths = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        # _sysconfigdata*.py is generated, and is about the machine.
        paths += [
            Path(parent, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    for path in sorted(paths, key=lambda p: (len(p.parts), p.as_posix())):
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few old sources declare another encoding


def text_file(path: str | Path, max_mib: float | None = None) -> Corpus:
    """Return a UTF-8 text file as one document.

    Args:
        path: the file.
        max_mib: read no more than this, in MiB (2**20 bytes); None for all of it.

    Raises:
        ConfigError: the file is missing, is empty, or holds no UTF-8 text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read --train_file {str(path)!r}: {error.strerror or error}. "
            "Give the path of a plain text file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--train_file {str(path)!r} is not UTF-8 text: {error.reason} at byte {error.start}. "
            "Give plain text; `iconv -f ORIGINAL -t UTF-8` converts other encodings."
        ) from error
    documents = tuple(_take([text], max_mib))
    if not documents:
        raise ConfigError(f"--train_file {str(path)!r} is empty. Give a file with text in it.")
    return Corpus(documents=documents, name=f"the file {Path(path).name!r}")


def hub_dataset(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    max_mib: float = HUB_MIB,
) -> Corpus:
    """Return the first texts of a hub dataset; it is streamed, not downloaded whole.

    Args:
        name: the dataset's name on the hub, or a local folder that `load_dataset` understands.
        config: its configuration, if it has several.
        split: the split to read.
        column: the column with the text.
        max_mib: where to stop, in MiB (2**20 bytes).

    Raises:
        ConfigError: `datasets` is missing, the dataset cannot be read, or it has no such column.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            "--dataset_name needs the `datasets` library: pip install datasets. "
            "Or name a local text with --train_file."
        ) from error
    try:
        rows = load_dataset(name, config, split=split, streaming=True)
        documents = tuple(_take(_column(rows, column), max_mib))
    except ConfigError:
        raise
    except Exception as error:  # network, server, format: it raises a score of unrelated classes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot read --dataset_name {name!r}: {reason}. "
            "Give a name on the hub, or a local text with --train_file."
        ) from error
    if not documents:
        raise ConfigError(f"--dataset_name {name!r}, split {split!r}, holds no text.")
    return Corpus(documents=documents, name=f"{len(documents)} rows of the dataset {name}")


def _column(rows: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    for row in rows:
        if column not in row:
            raise unknown_name("--text_column", column, row)
        if not isinstance(row[column], str):
            raise ConfigError(
                f"--text_column {column!r} holds {type(row[column]).__name__}; expected text."
            )
        yield row[column]


def _take(texts: Iterable[str], max_mib: float | None) -> Iterator[str]:
    """Yield the texts that are not blank, the last one cut where *max_mib* is reached."""
    left_bytes = float("inf") if max_mib is None else int(max_mib * MIB)
    for text in texts:
        if not text.strip():
            continue
        data = text.encode("utf-8")
        if len(data) >= left_bytes:
            if cut := data[: int(left_bytes)].decode("utf-8", errors="ignore"):
                yield cut
            return
        left_bytes -= len(data)
        yield text


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens for causal language modelling: labels are the inputs.

    Args:
        tokens: shape (num_blocks, block_size), integers.
    """

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.tokens[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def split_blocks(
    tokens: npt.NDArray[np.int32],
    *,
    block_size: int,
    eval_fraction: float,
    max_eval_blocks: int | None = None,
) -> tuple[Blocks, Blocks]:
    """Cut tokens into blocks; return those to train on and those to evaluate on.

    Every (1 / eval_fraction)-th block is held out, over the whole text, because the end of a text
    is often not like its beginning. What does not fill the last block is dropped.

    Args:
        tokens: shape (num_tokens,).
        block_size: tokens in a block.
        eval_fraction: share of the blocks that is held out, in (0, 0.5].
        max_eval_blocks: evaluate on no more than this many of them; the others stay unused.

    Raises:
        ConfigError: a setting is out of range, or the text is too short for two blocks.
    """
    if block_size < 2:
        raise ConfigError(f"--block_size is {block_size}; expected at least 2 tokens.")
    if not 0 < eval_fraction <= 0.5:
        raise ConfigError(f"--eval_fraction is {eval_fraction}; expected more than 0, at most 0.5.")
    if max_eval_blocks is not None and max_eval_blocks < 1:
        raise ConfigError(f"--max_eval_blocks is {max_eval_blocks}; expected at least 1.")
    num_blocks = len(tokens) // block_size
    if num_blocks < 2:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, too few for two blocks of {block_size} (one to "
            "train on, one to evaluate on). Give a longer text, or a smaller --block_size."
        )
    blocks = tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
    every = min(round(1 / eval_fraction), num_blocks)
    is_held_out = np.arange(num_blocks) % every == every - 1
    held_out = blocks[is_held_out]
    if max_eval_blocks is not None and max_eval_blocks < len(held_out):
        held_out = held_out[np.linspace(0, len(held_out) - 1, max_eval_blocks).astype(int)]
    return Blocks(blocks[~is_held_out]), Blocks(held_out)
