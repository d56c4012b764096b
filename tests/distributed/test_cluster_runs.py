"""Real training on the nodes of a local cluster: losses, bytes, rounds, a node that is lost.

Times are never asserted. Each run starts its nodes anew, which takes most of its half a minute.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import local_cluster
from cluster import cluster_checks, cluster_namespaces
from cluster.cluster_result import ClusterPoint, ClusterSweep
from cluster.cluster_sweep import ClusterError, Gathered
from hf_pyao.errors import ConfigError
from tests.helpers.ranks import needs_deepspeed

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"

pytestmark = [pytest.mark.thorough, pytest.mark.distributed]

ENGINES = ["ddp", pytest.param("zero2", marks=needs_deepspeed)]

LEAST, MOST = 0.98, 1.04
"""Bytes counted in a step by those expected: headers, acknowledgements and small messages come on top;
what one node sends around a step's end may count for the next."""


@pytest.fixture(autouse=True)
def _namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cluster_checks.check_system()
        cluster_checks.check_kernel(cluster_checks.find_isolation())
    except ConfigError as error:
        pytest.skip(f"not run: {error}")
    # The nodes import what this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(RECIPES)]))


@pytest.fixture
def moved_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that hf_pyao moved on each node in each training, as the nodes tell of it."""
    found: list[int] = []
    take = Gathered.take

    def take_and_note(self: Gathered, event: dict[str, Any]) -> None:
        if event["event"] == "trained":
            found.append(int(event["offloaded_bytes"]))
        take(self, event)

    monkeypatch.setattr(Gathered, "take", take_and_note)
    return found


def run_cluster(*options: str) -> ClusterSweep:
    fast = ("--rate", "100mbit", "--compute-steps", "0")
    return local_cluster.run(local_cluster.parse([*fast, *options]))


def assert_bytes_as_expected(point: ClusterPoint) -> None:
    """Assert what each node sent and received in a step: the engine's collectives, and headers."""
    for counted in (point.tx_bytes_per_step, point.rx_bytes_per_step):
        assert LEAST < fmean(counted) / point.expected_bytes_per_step < MOST
        assert min(counted) > 0.9 * max(counted)  # a ring: no node sends more than another


@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_send_the_same_at_every_micro_batch_and_learn_the_same_with_hf_pyao(
    engine: str, moved_bytes: list[int]
) -> None:
    options = ("--smoke", "--engine", engine, "--min-steps", "4")
    sweep, plain = run_cluster(*options), run_cluster(*options, "--no_activation_offload")
    assert [num_bytes > 0 for num_bytes in moved_bytes] == [True] * 4 + [False] * 4
    assert [point.rounds for point in sweep.points] == [8, 2]
    for point in sweep.points:
        assert_bytes_as_expected(point)
        assert len(point.step_s) == max(point.rounds, 4)
    small, large = (fmean(point.tx_bytes_per_step) for point in sweep.points)
    assert large == pytest.approx(small, rel=0.03)
    for point, reference in zip(sweep.points, plain.points, strict=True):
        assert point.losses_by_node == reference.losses_by_node  # to the bit, on each node
        assert point.losses_by_node[0] != point.losses_by_node[1]  # each has samples of its own
        assert point.losses[-1] < point.losses[0]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("ddp", "kill"), ("ddp", "unplug"), pytest.param("zero2", "kill", marks=needs_deepspeed)],
)
def test_a_lost_node_ends_the_others_and_a_resumed_run_learns_what_an_undisturbed_one_does(
    engine: str, kind: str, tmp_path: Path
) -> None:
    options = ("--smoke", "--engine", engine, "--micro-batches", "2", "--min-steps", "6")
    saves = ("--save-steps", "3", "--timeout", "15")
    interfaces = cluster_namespaces.list_interfaces()
    (undisturbed,) = run_cluster(*options).points
    assert len(undisturbed.losses) == 6
    lost = ("--kill-node", "1", "--kill-at-step", "5", "--kill-how", kind)
    with pytest.raises(ClusterError) as info:
        run_cluster(*options, *saves, *lost, "--output-dir", str(tmp_path))
    cause, *others = str(info.value).splitlines()
    assert cause.startswith(f"node 1 was {kind}")
    assert others and all(line.startswith("  node 0: ") for line in others)
    assert cluster_namespaces.list_interfaces() == interfaces
    assert (tmp_path / "opt_2_run0/checkpoint-3/trainer_state.json").is_file()
    (resumed,) = run_cluster(*options, *saves, "--resume", "--output-dir", str(tmp_path)).points
    assert resumed.first_step == 3
    assert resumed.losses_by_node == [losses[3:] for losses in undisturbed.losses_by_node]


@pytest.mark.parametrize(
    ("engine", "file"),
    [
        ("ddp", "five_nodes_ddp.yaml"),
        pytest.param("zero2", "five_nodes_zero2_bf16.yaml", marks=needs_deepspeed),
    ],
)
def test_the_launch_file_of_five_nodes_launches_five_nodes(engine: str, file: str) -> None:
    config = str(RECIPES / "configs" / file)
    options = ("--config", config, "--micro-batches", "1", "--target", "1", "--min-steps", "2")
    (point,) = run_cluster("--engine", engine, *options).points
    assert len(point.losses_by_node) == 5
