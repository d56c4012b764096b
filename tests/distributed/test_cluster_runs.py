"""Real training on the nodes of a local cluster: losses, bytes, rounds, a node that is lost.

Times are never asserted. Each run starts its nodes anew, which takes most of its half a minute.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import local_cluster
from cluster import cluster_checks, cluster_namespaces
from cluster.cluster_result import ClusterPoint, ClusterSweep
from cluster.cluster_settings import EVENT_PREFIX, NodeSettings
from cluster.cluster_sweep import ClusterError, Gathered, plan_points
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
        cluster_checks.check_kernel(cluster_checks.find_isolation(), needs_delay=False)
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
    ("engine", "gradients_moved"),
    [
        ("ddp", 2),
        pytest.param("zero1", 3, marks=needs_deepspeed),
        pytest.param("zero2", 7, marks=needs_deepspeed),
    ],
)
def test_accumulation_amortises_what_the_engine_sends_once_in_a_step(
    engine: str, gradients_moved: int
) -> None:
    options = ("--gradient-accumulation", "3", "--micro-batches", "1", "--target", "1")
    # What is on its way as the first step begins or the last one ends counts little in twelve.
    more = ("--smoke", "--engine", engine, "--min-steps", "12")
    (point,) = run_cluster(*options, *more).points
    assert point.expected_bytes_per_step == gradients_moved * point.gradient_bytes / 2
    assert_bytes_as_expected(point)


def losses_of_one_process(
    engine_options: dict[str, Any], micro_batch: int, steps: int, folder: Path
) -> list[float]:
    """Return the loss of each step of the same training in one process, without a network."""
    points = plan_points(
        ["opt"],
        [micro_batch],
        gradient_accumulation=1,
        nodes=1,
        target=1,
        target_over="node",
        steps=(steps, steps),
        repeats=1,
    )
    settings = NodeSettings(
        nodes=1,
        engine="ddp",
        rate_mbit=100.0,
        points=points,
        compute_steps=0,
        activation_offload=False,
        model_size="mini",
        options=[],
        timeout_s=45.0,
        interface="",
        work_dir=str(folder),
        output_dir=None,
        save_steps=0,
        resume=False,
        **engine_options,
    )
    path = folder / "settings.json"
    path.write_text(json.dumps(dataclasses.asdict(settings)))
    environment = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(RECIPES / "cluster" / "cluster_node.py"), str(path)],
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(EVENT_PREFIX)]
    events = [json.loads(line.removeprefix(EVENT_PREFIX)) for line in lines]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.parametrize("engine", ENGINES)
def test_five_nodes_learn_what_one_process_does_with_the_same_global_batch(
    engine: str, tmp_path: Path
) -> None:
    options = ("--engine", engine, "--precision", "fp32", "--micro-batches", "2", "--target", "40")
    sweep = run_cluster(*options, "--min-steps", "6")
    (point,) = sweep.points
    assert (sweep.setup.nodes, len(point.losses_by_node), point.rounds) == (5, 5, 4)
    assert_bytes_as_expected(point)
    # Sums in another order: float32 agrees to seven digits, and six steps lose one or two.
    one = losses_of_one_process({"precision": "fp32"}, 10, 6, tmp_path)
    assert point.losses == pytest.approx(one, rel=1e-5)
    assert len({losses[0] for losses in point.losses_by_node}) == 5


@pytest.mark.parametrize("engine", ENGINES)
def test_five_nodes_learn_the_same_to_the_bit_with_hf_pyao_and_without(
    engine: str, moved_bytes: list[int]
) -> None:
    options = ("--engine", engine, "--micro-batches", "1,4", "--target", "40", "--min-steps", "5")
    sweep, plain = run_cluster(*options), run_cluster(*options, "--no_activation_offload")
    assert [num_bytes > 0 for num_bytes in moved_bytes] == [True] * 10 + [False] * 10
    for point, reference in zip(sweep.points, plain.points, strict=True):
        assert len(point.losses_by_node) == 5
        assert [len(losses) for losses in point.losses_by_node] == [max(point.rounds, 5)] * 5
        assert point.losses_by_node == reference.losses_by_node
        assert len({losses[0] for losses in point.losses_by_node}) == 5  # samples of its own


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
