"""The rank of a process is told in one place, before, during and after a process group."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import hf_pyao
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.run import check_report_path
from hf_pyao.ranks import ProcessRank, process_rank

PACKAGE = Path(hf_pyao.__file__).parent
HOME = PACKAGE / "ranks.py"
NAMED_SO = {("tools", "option_table.py")}
"""Where ``RANK`` is the metavar of LoRA's rank."""


@contextmanager
def process_group(rank: int, num_ranks: int) -> Iterator[None]:
    """Make a group that exchanges nothing, so that one process is enough."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("announced", "rank"), [(None, 0), ("", 0), ("0", 0), ("1", 1), ("17", 17), ("none", 0)]
)
@pytest.mark.sampled(every=1)
def test_without_a_group_the_launcher_says_it(
    announced: str | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if announced is not None:
        monkeypatch.setenv("RANK", announced)
    found = process_rank()
    assert found == ProcessRank(rank, num_ranks=1)
    assert found.is_first == (rank == 0)
    assert not found.is_told, "there is no group to hear of the first rank in"


@pytest.mark.parametrize("rank", [0, 2])
def test_before_and_after_the_group_the_answer_is_the_same(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    assert process_rank() == ProcessRank(rank, 1)
    with process_group(rank, 3):
        assert process_rank() == ProcessRank(rank, 3)
        assert process_rank().is_told == (rank != 0)
    assert process_rank() == ProcessRank(rank, 1)


def test_the_group_is_believed_before_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with process_group(1, 2):
        assert process_rank() == ProcessRank(1, 2)


def test_a_report_path_is_checked_by_the_rank_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)  # as under torch.multiprocessing
    with process_group(1, 2):
        check_report_path(tmp_path)
    with process_group(0, 2), pytest.raises(ConfigError, match="folder"):
        check_report_path(tmp_path)


def test_no_other_file_asks_for_the_rank() -> None:
    """Neither torch, nor the launcher's variable; accelerate's processes are another question."""
    for path in PACKAGE.rglob("*.py"):
        if path == HOME:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path}:{getattr(node, 'lineno', 0)}: use hf_pyao.ranks"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("get_rank", "get_world_size"), place
            if isinstance(node, ast.Constant):
                assert node.value != "RANK" or path.parts[-2:] in NAMED_SO, place
