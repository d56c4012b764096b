"""The share of the host memory that a process takes by default."""

from __future__ import annotations

import pytest

from hf_pyao import PyAOConfig, attach
from hf_pyao.engine.stores import HostPool
from hf_pyao.engine.stores.host_pool import HostBuffer
from hf_pyao.engine.stores.host_share import HostShare, ranks_of_node
from tests.helpers import tiny_model

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1, None)),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, (8, "LOCAL_WORLD_SIZE")),
        ({"LOCAL_WORLD_SIZE": "1", "MPI_LOCALNRANKS": "4"}, (1, "LOCAL_WORLD_SIZE")),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": " 4 "}, (4, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ({"MPI_LOCALNRANKS": "4"}, (4, "MPI_LOCALNRANKS")),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "4"}, (4, "MV2_COMM_WORLD_LOCAL_SIZE")),
        ({"LOCAL_SIZE": "4"}, (4, "LOCAL_SIZE")),
        ({"SLURM_NTASKS_PER_NODE": "4"}, (4, "SLURM_NTASKS_PER_NODE")),
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, (8, "SLURM_TASKS_PER_NODE")),
        ({"SLURM_TASKS_PER_NODE": "2(x2),6,1"}, (6, "SLURM_TASKS_PER_NODE")),
        ({"SLURM_TASKS_PER_NODE": "2(x2),6,1", "SLURM_NODEID": "1"}, (2, "SLURM_TASKS_PER_NODE")),
        ({"SLURM_TASKS_PER_NODE": "2(x2),6,1", "SLURM_NODEID": "2"}, (6, "SLURM_TASKS_PER_NODE")),
        ({"SLURM_TASKS_PER_NODE": "2(x2),6,1", "SLURM_NODEID": "9"}, (6, "SLURM_TASKS_PER_NODE")),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "8"},
            (1, "SLURM_STEP_TASKS_PER_NODE"),
        ),
    ],
)
def test_the_ranks_of_the_node_are_what_the_launcher_says(
    environ: dict[str, str], expected: tuple[int, str | None]
) -> None:
    assert ranks_of_node(environ) == expected


@pytest.mark.parametrize("value", ["", "0", "-2", "two", "1.5", "²", "8(x", "8(y2)", ",", "9" * 99])
def test_values_that_are_no_number_are_passed_over(value: str) -> None:
    environ = {"LOCAL_WORLD_SIZE": value, "SLURM_TASKS_PER_NODE": value, "MPI_LOCALNRANKS": "3"}
    assert ranks_of_node(environ) == (3, "MPI_LOCALNRANKS")
    del environ["MPI_LOCALNRANKS"]
    assert ranks_of_node(environ) == (1, None)


def test_the_ranks_of_a_node_take_half_of_the_host_together() -> None:
    alone = HostShare.of_this_process({}, lambda: 64 * GIB)
    assert alone.capacity_bytes == 32 * GIB
    assert alone.describe() == "half of the 64.0 GiB available"
    each = HostShare.of_this_process({"LOCAL_WORLD_SIZE": "8"}, lambda: 64 * GIB)
    assert 8 * each.capacity_bytes == 32 * GIB
    assert "shared by 8 ranks of this node (LOCAL_WORLD_SIZE)" in each.describe()


class Host:
    """A machine whose memory is taken by pools."""

    def __init__(self, nbytes: int) -> None:
        self.total_bytes = nbytes
        self.taken_bytes = 0
        self.pools: list[HostPool] = []

    def available(self) -> int:
        return self.total_bytes - self.taken_bytes - sum(pool.pool_bytes for pool in self.pools)

    def pool(self, num_ranks: int = 1) -> HostPool:
        environ = {"LOCAL_WORLD_SIZE": str(num_ranks)}
        share = HostShare.of_this_process(environ, self.available)
        self.pools.append(HostPool(share.capacity_bytes, pin=False, share=share))
        return self.pools[-1]


def fill(pool: HostPool) -> list[HostBuffer]:
    """Take all that *pool* gives; what it gave is taken as long as it is held."""
    held: list[HostBuffer] = []
    while (buffer := pool.acquire(4 * MIB)) is not None:
        held.append(buffer)
    return held


def test_several_models_of_one_process_leave_a_quarter_of_the_host() -> None:
    host = Host(1024 * MIB)
    first, second, third = host.pool(), host.pool(), host.pool()
    assert first.capacity_bytes + second.capacity_bytes == 1024 * MIB
    fill(first)
    assert first.pool_bytes == 512 * MIB, "alone it gets its half"
    fill(second)
    assert second.pool_bytes == second.capacity_bytes == 256 * MIB
    fill(third)
    assert host.available() == 256 * MIB


def test_what_others_took_since_is_not_reserved() -> None:
    host = Host(1024 * MIB)
    pool = host.pool()
    fill_bytes = 100 * MIB
    host.taken_bytes = 1024 * MIB * 3 // 4 - fill_bytes
    held = fill(pool)
    assert pool.pool_bytes == pool.capacity_bytes == fill_bytes
    host.taken_bytes = 1000 * MIB
    assert pool.acquire(MIB) is None
    assert pool.pool_bytes == fill_bytes, "nothing is given back"
    del held


@pytest.mark.parametrize("together", [True, False])
def test_every_rank_gets_its_share_whoever_comes_first(together: bool) -> None:
    host = Host(1024 * MIB)
    pools = [host.pool(num_ranks=4) for _ in range(4)]
    growing = pools if together else []
    held: list[HostBuffer] = []
    while growing:
        taken = [(pool, pool.acquire(4 * MIB)) for pool in growing]
        growing = [pool for pool, buffer in taken if buffer is not None]
        held.extend(buffer for _, buffer in taken if buffer is not None)
    for pool in pools:
        fill(pool)
    assert [pool.pool_bytes for pool in pools] == [128 * MIB] * 4


def test_a_full_share_says_how_it_came_about(caplog: pytest.LogCaptureFixture) -> None:
    fill(Host(64 * MIB).pool(num_ranks=2))
    (record,) = caplog.records
    assert "half of the 0.1 GiB available, shared by 2 ranks" in record.getMessage()


def test_the_default_is_the_ranks_share_and_said_in_the_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with attach(tiny_model("opt"), PyAOConfig(policy="all")) as offloader:
        pool = offloader.host_pool
        assert pool.share is not None
        assert pool.capacity_bytes == int(pool.share.available_bytes / 16)
        assert "shared by 8 ranks of this node (LOCAL_WORLD_SIZE)" in offloader.describe()
    with attach(tiny_model("opt"), PyAOConfig(policy="all", host_memory_gib=0.5)) as offloader:
        assert offloader.host_pool.capacity_bytes == 2**29, "what was given is for each process"
        assert "ranks" not in offloader.describe()
