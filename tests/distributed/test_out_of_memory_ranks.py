"""One of two ranks runs out of memory: it goes on alone, or both end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import logs_of, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

WORKER = "tests.distributed.memory_worker"
WITHIN_S = 60


def run(
    folder: Path, case: str, *, ends: tuple[int, ...] = (), module: str = WORKER
) -> list[dict[str, Any]]:
    """Run two ranks; return what each saw, and how long after the other it ended.

    Args:
        folder: for their files.
        case: of the worker.
        ends: ranks that end since their peer has.
        module: of the worker.
    """
    found: list[dict[str, Any]] = run_ranks(module, folder, case)
    logs = logs_of(folder)
    others = [facts["rank"] for facts in found if "other" in facts]
    assert others == list(ends), f"{found}\n{logs}"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run(tmp_path_factory.mktemp("undisturbed"), "nothing")
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["tightened"] == found[1]["tightened"] == 0
    return found


@pytest.mark.parametrize(
    "case",
    [
        "backward without exchange",
        "backward without exchange, context inside",
        pytest.param("forward without exchange", marks=pytest.mark.thorough),
        pytest.param("forward of the exchange", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_runs_its_micro_batch_again_alone(
    case: str, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    found = run(tmp_path, case)
    assert [facts["tightened"] for facts in found] == [0, 1]
    assert found[1]["num_left"] == 0
    assert [facts["digest"] for facts in found] == [facts["digest"] for facts in undisturbed]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("backward of the exchange", "DistributedDataParallel has begun|begun to exchange"),
        pytest.param(
            "backward of the exchange, context inside",
            "DistributedDataParallel has begun|begun to exchange",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "backward without exchange, after the first",
            "begun to exchange data with other ranks",
            marks=pytest.mark.thorough,
        ),
        pytest.param("ever", "nothing tighter is left", marks=pytest.mark.thorough),
        pytest.param(
            "forward with buffers",
            "begun to exchange data with other ranks",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_rank_that_cannot_go_on_ends_with_the_message_and_its_peer_with_it(
    case: str, reason: str, tmp_path: Path
) -> None:
    first, second = run(tmp_path, case, ends=(0,))
    assert re.search(reason, second["error"])
    assert "Connection closed by peer" in first["other"]
    assert abs(first["ended"] - second["ended"]) < WITHIN_S
