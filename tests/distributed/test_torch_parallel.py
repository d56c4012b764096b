"""torch's pipelines and tensor parallelism on two ranks: bits as without hf_pyao, and what moves."""

from __future__ import annotations

from typing import Any

import pytest

from hf_pyao.engine.transfer.layout import Stays
from tests.distributed.torch_parallel_worker import NUM_MICRO_BATCHES, SCHEDULES
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

TENSOR_PARALLEL = "tensor parallel"

COUNTED = ("num_micro_batches", "offloaded_bytes", "reloaded_bytes")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what two ranks saw of all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = (*SCHEDULES, TENSOR_PARALLEL)
    return run_ranks("tests.distributed.torch_parallel_worker", folder, *cases)


@pytest.mark.parametrize("case", SCHEDULES)
def test_each_micro_batch_of_a_pipeline_is_counted(case: str, ranks: list[Any]) -> None:
    for rank in ranks:
        plain, ours = rank[case]["plain"], rank[case]["ours"]
        assert ours["bits"] == plain["bits"]
        assert len(plain["bits"]) == 2 * SCHEDULES[case][1]
        assert ours["losses"] == plain["losses"]
        # Before the first step the schedule runs each stage once more, to learn its shapes.
        first, second = ours["totals"]
        assert len(first) == SCHEDULES[case][1]
        for before, after, last in zip(first, second, ours["last"], strict=True):
            added = {key: after[key] - before[key] for key in COUNTED}
            assert added["num_micro_batches"] == NUM_MICRO_BATCHES
            assert added["offloaded_bytes"] == NUM_MICRO_BATCHES * last["offloaded_bytes"] > 0
            assert added["reloaded_bytes"] == NUM_MICRO_BATCHES * last["reloaded_bytes"] > 0


def test_tensor_parallel_layers_offload_their_local_tensors(ranks: list[Any]) -> None:
    for rank in ranks:
        plain, ours = rank[TENSOR_PARALLEL]["plain"], rank[TENSOR_PARALLEL]["ours"]
        assert ours["bits"] == plain["bits"]
        assert ours["losses"] == plain["losses"]
        assert ours["moved"] > 0 == ours["moved_parameters"]
        (last,) = ours["last"]
        assert last["offloaded_bytes"] > 0
        assert not last.get(f"kept_bytes/{Stays.SUBCLASS}")
