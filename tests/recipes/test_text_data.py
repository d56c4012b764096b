"""Sources of text, and the blocks they become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_pyao.errors import ConfigError
from text_data import hub_dataset, split_blocks, standard_library, text_file


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_library_is_the_same_at_every_call_and_within_its_limit() -> None:
    first, second = standard_library(0.5), standard_library(0.5)
    assert first == second
    num_bytes = sum(len(document.encode()) for document in first.documents)
    # Short of it by at most the rest of one character.
    assert 2**19 - 4 < num_bytes <= 2**19


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read.*No such file.*plain text file"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"caf\xe9 au lait", "not UTF-8 text.*at byte 3.*iconv"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        text_file(path)


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "eval_fraction"), [(1003, 10, 0.05), (64, 32, 0.5), (90, 7, 0.3)]
)
def test_every_token_is_in_one_block_and_in_order(
    num_tokens: int, block_size: int, eval_fraction: float
) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    train, held_out = split_blocks(tokens, block_size=block_size, eval_fraction=eval_fraction)
    items = [blocks[i] for blocks in (train, held_out) for i in range(len(blocks))]
    for item in items:
        assert item["input_ids"].dtype == torch.int64
        assert torch.equal(item["input_ids"], item["labels"])
        assert item["input_ids"].diff().eq(1).all()
    seen = sorted(token for item in items for token in item["input_ids"].tolist())
    assert seen == list(range(num_tokens // block_size * block_size))
    # Held out: the share asked for, to within what rounding 1/share to a whole number does.
    assert 0 < len(held_out) <= len(items) * eval_fraction * 1.2
    assert len(train) > 0


@pytest.fixture
def text_folder(tmp_path: Path) -> str:
    """A folder that `datasets` reads like a dataset of the hub: one row for each line."""
    write(tmp_path, {"data/train.txt": b"first row\n\nsecond row\nthird row\n"})
    return str(tmp_path / "data")


def test_dataset_is_read_up_to_the_limit(text_folder: str) -> None:
    assert hub_dataset(text_folder).documents == ("first row", "second row", "third row")
    assert hub_dataset(text_folder, max_mib=15 / 2**20).documents == ("first row", "second")
