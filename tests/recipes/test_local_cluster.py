"""A local cluster without training: what is refused, the network, and who watches whom."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import local_cluster
from cluster import cluster_checks, cluster_namespaces
from cluster.cluster_node import interface_bytes
from cluster.cluster_result import (
    ClusterPoint,
)
from cluster.cluster_settings import Fault, NodeSettings, SupervisorSettings
from cluster.cluster_sweep import ClusterError, plan_points, run_sweep
from hf_pyao.errors import ConfigError
from tests.recipes.cluster_stub import processes_with, wait_until_gone, write_stub
from tests.recipes.conftest import RECIPES, REPOSITORY

CONFIGS = RECIPES / "configs"


@pytest.fixture(scope="module")
def isolation() -> str:
    """How namespaces are made here; where they cannot be, the test says that it was not run."""
    if sys.platform != "linux":
        pytest.skip("not run: network namespaces are Linux's")
    try:
        cluster_checks.check_system()
        found = cluster_checks.find_isolation()
        cluster_checks.check_kernel(found)
    except ConfigError as error:
        pytest.skip(f"not run: {error}")
    return found


def run_main(*options: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        local_cluster.main([*options])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "1"], "--nodes is 1; expected 2 to 64"),
        (["--rate", "50"], "--rate is '50'; expected a rate from 100kbit to 100gbit"),
        (["--rate", "0mbit"], "--rate is '0mbit'"),
        (["--micro-batches", "1,2,2"], "--micro-batches is '1,2,2'"),
        (["--micro-batches", "a"], "--micro-batches is 'a'"),
        (["--target", "0"], "--target is 0; expected 1 or more"),
        (["--kill-node", "5"], "--kill-node is 5; the nodes are 0 to 4"),
        (["--kill-node", "1", "--kill-at-step", "0"], "--kill-at-step is 0"),
        (
            ["--kill-node", "1", "--kill-at-step", "9", "--target", "1"],
            "--kill-at-step is 9, and the first point has 4 steps",
        ),
        (["--model-size", "mimi"], "did you mean 'mini'?"),
        (["--resume"], "--save-steps and --resume need --output-dir"),
        (["--config", "missing.yaml"], "cannot read --config 'missing.yaml': No such file"),
        (
            ["--nodes", "4", "--config", str(CONFIGS / "five_nodes_ddp.yaml")],
            "--nodes is 4, and",
        ),
        (
            ["--config", str(CONFIGS / "five_nodes_zero2_bf16.yaml")],
            "--engine ddp is MULTI_GPU to accelerate, and",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_starts(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # not even a probe
    assert run_main("--engine", "ddp", *options) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("local_cluster.py: error: ")
    assert message in line


def test_zero_without_deepspeed_is_refused_and_not_the_default(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(cluster_checks.importlib.util, "find_spec", lambda name: None)
    assert run_main("--engine", "zero2") == 2
    assert "--engine zero2 needs DeepSpeed, which is not installed: pip" in capfd.readouterr().err
    assert cluster_checks.choose_engine(None) == "ddp"
    monkeypatch.setattr(cluster_checks.importlib.util, "find_spec", lambda name: object())
    assert cluster_checks.choose_engine(None) == "zero2"


def put_tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str | None) -> None:
    """Let the PATH hold the real tools, but for *scripts*: replaced, or (None) missing."""
    for name in ("ip", "tc", "unshare", "mount", "sh", "true", "sudo"):
        path = folder / name
        if name in scripts:
            if (script := scripts[name]) is not None:
                path.write_text(f"#!/bin/sh\n{script}\n")
                path.chmod(0o755)
        elif (real := cluster_namespaces.find_tool(name)) is not None:
            path.symlink_to(real)
    monkeypatch.setattr(cluster_namespaces, "TOOL_PATH", str(folder))


def test_without_privileges_each_way_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forbidden = "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"
    put_tools(
        tmp_path, monkeypatch, unshare=forbidden, sudo="echo 'a password is required' >&2; exit 1"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_main("--engine", "ddp") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "user namespace: unshare: unshare failed: Operation not permitted" in line
    assert "sudo: a password is required" in line
    assert "capability SYS_ADMIN" in line


# ---- the plan, the bytes, the figures ------------------------------------------------------------


def points_of(architectures: list[str], micro_batches: list[int], **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "gradient_accumulation": 1,
        "nodes": 5,
        "target": 256,
        "target_over": "node",
        "steps": (1, None),
        "repeats": 1,
    }
    return plan_points(architectures, micro_batches, **{**settings, **changes})


def test_rounds_count_samples_over_all_nodes_or_on_each() -> None:
    def rounds(target_over: str, gradient_accumulation: int = 1) -> list[int]:
        points = points_of(
            ["opt"],
            [1, 2, 4, 8],
            gradient_accumulation=gradient_accumulation,
            target_over=target_over,
        )
        assert [point.steps for point in points] == [point.rounds for point in points]
        return [point.rounds for point in points]

    assert rounds("all") == [52, 26, 13, 7]
    assert rounds("node") == [256, 128, 64, 32]
    assert rounds("all", gradient_accumulation=4) == [13, 7, 4, 2]


# ---- namespaces ----------------------------------------------------------------------------------

NETWORK = """
import json, subprocess, sys
from cluster.cluster_namespaces import *
run_tools([*network_commands(2), *shaping_commands(2, 5.0), *unshaping_commands(2)])
unshaped = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True).stdout
assert "tbf" not in unshaped, unshaped
run_tools(shaping_commands(2, 50.0))
SERVE = "import socket; s = socket.create_server(('', 5000)); print(flush=True); c = s.accept()[0]\\n"
SERVE += "n = 0\\nwhile d := c.recv(65536): n += len(d)\\nprint(n)"
SEND = "import socket; s = socket.create_connection(('10.77.0.11', 5000)); s.sendall(bytes(10**6))"
def said(node, *command):
    return subprocess.run(in_node(node, *command), capture_output=True, text=True).stdout
server = subprocess.Popen(in_node(1, sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True)
server.stdout.readline()
subprocess.run(in_node(0, sys.executable, "-c", SEND), check=True)
print(json.dumps({
    "received": int(server.communicate()[0]),
    "outside": list_interfaces(),
    "routes": [said(node, "ip", "route").split() for node in (0, 1)],
    "shapes": [said(node, "tc", "qdisc", "show", "dev", "eth0") for node in (0, 1)],
    "port": subprocess.run(["tc", "qdisc", "show", "dev", "port1"], capture_output=True, text=True).stdout,
    "counters": said(0, "cat", "/proc/self/net/dev"),
}))
"""


@pytest.mark.thorough
def test_nodes_reach_each_other_over_shaped_links_and_nothing_else(
    isolation: str, tmp_path: Path
) -> None:
    before = cluster_namespaces.list_interfaces()
    done = subprocess.run(
        [*cluster_namespaces.throw_away(isolation), sys.executable, "-c", NETWORK],
        env={**cluster_namespaces.tool_environment(), "PYTHONPATH": f"{RECIPES}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["received"] == 10**6
    assert sorted(seen["outside"]) == ["lo", "port0", "port1", "switch"]
    for route in seen["routes"]:  # no way out
        assert route[:3] == ["10.77.0.0/24", "dev", "eth0"] and "default" not in route
    for shape in (*seen["shapes"], seen["port"]):
        assert "tbf" in shape and "rate 50Mbit" in shape
    (tmp_path / "dev").write_text(seen["counters"])
    _, sent = interface_bytes("eth0", str(tmp_path / "dev"))
    assert 1_000_000 < sent < 1_080_000  # the payload, and headers
    assert cluster_namespaces.list_interfaces() == before


def settings_of(python: str, *, fault: Fault | None = None, **changes: Any) -> SupervisorSettings:
    points = points_of(["opt"], [1], nodes=3, target=3, steps=(3, None))
    values: dict[str, Any] = {
        "nodes": 3,
        "engine": "ddp",
        "precision": "fp32",
        "rate_mbit": 50.0,
        "points": points,
        "compute_steps": 0,
        "activation_offload": True,
        "model_size": "mini",
        "options": [],
        "timeout_s": 1.0,
        "work_dir": "",
        "output_dir": None,
        "save_steps": 0,
        "resume": False,
    }
    return SupervisorSettings(
        node=NodeSettings(**values),
        python=python,
        launch_options=[],
        start_timeout_s=changes.get("start_timeout_s", 60.0),
        fault=fault,
    )


RunStub = Callable[..., tuple[list[ClusterPoint], list[dict[str, Any]]]]


@pytest.fixture
def run_stub(isolation: str, tmp_path: Path) -> RunStub:
    """Return a function that runs nodes of a given behaviour; points and events."""

    def run(behaviour: str, **settings: Any) -> tuple[list[ClusterPoint], list[dict[str, Any]]]:
        python = write_stub(tmp_path / "stub", behaviour)
        events: list[dict[str, Any]] = []
        points = run_sweep(settings_of(python, **settings), isolation, events.append)
        return points, events

    return run


@pytest.mark.thorough
def test_what_the_nodes_tell_becomes_a_point(run_stub: RunStub) -> None:
    ((point,), events) = run_stub("begin(); steps(1, 3); emit('done')")
    assert point.step_s == pytest.approx([0.1, 0.2, 0.3])
    assert point.target_s == pytest.approx(0.6)
    assert point.losses == [2, 3, 4]
    assert point.losses_by_node == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert point.tx_bytes_per_step == [100, 100, 100]  # the first step's are left out
    assert point.expected_bytes_per_step == pytest.approx(2 * 2 / 3 * 4000)
    assert point.compute_step_s is point.collectives_s is None
    (network,) = [event for event in events if event["event"] == "network"]
    assert sorted(network["interfaces"]) == ["lo", "port0", "port1", "port2", "switch"]


@pytest.mark.thorough
def test_a_node_that_fails_is_named_with_what_it_said(run_stub: RunStub) -> None:
    fails = "begin()\nif node == 1: emit('failed', error='no such text'); sys.exit(2)\ntime.sleep(0.2)\n"
    with pytest.raises(ClusterError, match=r"^node 1: no such text; all nodes had ended") as info:
        run_stub(fails + "emit('failed', error='connection closed'); sys.exit(1)")
    assert "  node 2: connection closed" in str(info.value).splitlines()
    assert "node 1" not in "".join(str(info.value).splitlines()[1:])


@pytest.mark.thorough
def test_a_killed_node_ends_the_others_in_time_and_is_the_cause(run_stub: RunStub) -> None:
    # Node 0 hears of it, node 2 never does: the launcher ends it.
    waits = "begin(); steps(1, 1)\nif node == 0: time.sleep(0.5); emit('failed', error='reset by peer')\n"
    start = time.monotonic()
    with pytest.raises(ClusterError) as info:
        run_stub(waits + "time.sleep(1000)", fault=Fault(node=1, step=2, kind="kill"))
    assert time.monotonic() - start < 30
    lines = str(info.value).splitlines()
    assert lines[0].startswith("node 1 was killed in step 2, as asked for; all nodes had ended")
    assert lines[1:] == [
        "  node 0: reset by peer",
        "  node 2: still running 1 s later; ended by the launcher",
    ]


OUTER = """
import json, sys
from cluster.cluster_settings import SupervisorSettings
from cluster.cluster_sweep import run_sweep
from hf_pyao.plan.documents.schema import read_fields
settings = read_fields(SupervisorSettings, json.loads(sys.argv[1]), "settings")
run_sweep(settings, sys.argv[2], lambda event: print(event["event"], flush=True))
"""


@pytest.mark.thorough
@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_nothing_is_left_when_the_launcher_is_ended(
    name: str, isolation: str, tmp_path: Path
) -> None:
    before = cluster_namespaces.list_interfaces()
    marker = f"{tmp_path.name}_asleep_{os.getpid()}"
    python = write_stub(
        tmp_path / "stub",
        f"begin()\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}])",
    )
    settings = json.dumps(dataclasses.asdict(settings_of(python)))
    outer = subprocess.Popen(
        [sys.executable, "-c", OUTER, settings, isolation],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{RECIPES}:{REPOSITORY}"},
        # A shell's background jobs, and all that they start, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert outer.stdout is not None
    for line in outer.stdout:
        if line == "point\n" and len(processes_with(marker)) == 3:
            break
        time.sleep(0.1)
    assert processes_with(marker)
    outer.send_signal(signal.Signals[name])
    assert outer.wait(20) != 0
    outer.stdout.close()
    wait_until_gone(marker)
    wait_until_gone(str(RECIPES / "cluster" / "cluster_supervisor.py"))
    assert cluster_namespaces.list_interfaces() == before
