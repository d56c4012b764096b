"""Sources of text, and the blocks they become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def test_library_reads_modules_first_and_leaves_out_what_is_not_the_library(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "zebra.py": b"1 zebra",
            "ant.py": b"0 ant",
            "pack/a.py": b"2 pack",
            "empty.py": b"\n",
            "latin.py": "# é".encode("latin-1"),
            "notes.txt": b"no source",
            "_sysconfigdata__linux_.py": b"of this machine",
            "test/test_ant.py": b"a test",
            "pack/tests/test_a.py": b"a test",
            "site-packages/other.py": b"another project",
        },
    )
    assert standard_library(folder=tmp_path).documents == ("0 ant", "1 zebra", "2 pack")


def test_library_without_sources_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--train_file"):
        standard_library(folder=tmp_path)


def test_file_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("aé" * 100, encoding="utf-8")  # 3 bytes each time
    assert text_file(path).documents == ("aé" * 100,)
    assert text_file(path, max_mib=5 / 2**20).documents == ("aéa",)


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


def test_a_folder_is_refused_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        text_file(tmp_path)


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


def test_held_out_blocks_come_from_the_whole_text() -> None:
    tokens = np.arange(10_000, dtype=np.int32)
    _, held_out = split_blocks(tokens, block_size=10, eval_fraction=0.05, max_eval_blocks=5)
    starts = [int(held_out[i]["input_ids"][0]) for i in range(len(held_out))]
    assert len(starts) == 5
    assert starts[0] < 1000
    assert starts[-1] > 9000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "--block_size is 1"),
        ({"eval_fraction": 0.0}, "--eval_fraction is 0"),
        ({"eval_fraction": 0.6}, "--eval_fraction is 0.6"),
        ({"max_eval_blocks": 0}, "--max_eval_blocks is 0"),
        ({"block_size": 51}, r"100 tokens, too few for two blocks of 51.*smaller --block_size"),
    ],
)
def test_impossible_splits_are_refused(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"block_size": 10, "eval_fraction": 0.1, **settings}
    with pytest.raises(ConfigError, match=message):
        split_blocks(np.zeros(100, dtype=np.int32), **given)


def test_dataset_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        hub_dataset("some/dataset")


@pytest.fixture
def text_folder(tmp_path: Path) -> str:
    """A folder that `datasets` reads like a dataset of the hub: one row for each line."""
    write(tmp_path, {"data/train.txt": b"first row\n\nsecond row\nthird row\n"})
    return str(tmp_path / "data")


def test_dataset_is_read_up_to_the_limit(text_folder: str) -> None:
    assert hub_dataset(text_folder).documents == ("first row", "second row", "third row")
    assert hub_dataset(text_folder, max_mib=15 / 2**20).documents == ("first row", "second")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "txt"}, "unknown --text_column 'txt'; did you mean 'text'"),
        ({"split": "validation"}, "cannot read --dataset_name"),
    ],
)
def test_what_a_dataset_does_not_have_is_named(
    text_folder: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hub_dataset(text_folder, **options)
