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
from cluster.cluster_node import interface_bytes, newest_checkpoint
from cluster.cluster_report import draw_sweep, format_sweep, predicted_step_s
from cluster.cluster_result import (
    ENGINES,
    ClusterPoint,
    ClusterSetup,
    ClusterSweep,
    read_sweep,
    write_sweep,
)
from cluster.cluster_settings import Fault, NodeSettings, SupervisorSettings
from cluster.cluster_sweep import ClusterError, plan_points, run_sweep
from cluster.cluster_volume import bytes_per_step, gradient_bytes, link_seconds, volume_coefficient
from hf_pyao.errors import ConfigError
from hf_pyao.plan.documents.schema import ReportError
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
        cluster_checks.check_kernel(found, needs_delay=False)
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
        (["--delay", "5"], "--delay is '5'; expected more than 0 and at most 1s"),
        (["--port", "80"], "--port is 80; expected 1024 to 65535"),
        (["--interface", "wlan7"], "--interface is 'wlan7', and the interface that joins"),
        (["--interface", "lo"], "lo reaches the node itself alone"),
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


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("tool", ["ip", "tc", "unshare"])
def test_a_missing_tool_is_named(
    tool: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("ip", "tc", "unshare", "mount"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / tool).unlink()
    monkeypatch.setattr(cluster_namespaces, "TOOL_PATH", str(tmp_path))
    assert run_main("--engine", "ddp") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"`{tool}` is not installed" in line


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


def test_root_and_sudo_are_the_second_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_users = 'case "$*" in *--user*) echo no user namespaces >&2; exit 1;; esac'
    put_tools(tmp_path, monkeypatch, unshare=no_users, sudo='shift; exec "$@"')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cluster_checks.find_isolation() == "root"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster_checks.find_isolation() == "sudo"
    assert cluster_namespaces.throw_away("sudo")[:3] == ["sudo", "-n", "unshare"]


def test_a_kernel_without_netem_refuses_a_delay_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    tc = 'case "$*" in *netem*) echo "Specified qdisc kind is unknown." >&2; exit 2;; esac'
    put_tools(tmp_path, monkeypatch, tc=tc)
    cluster_checks.check_kernel(isolation, needs_delay=False)
    with pytest.raises(ConfigError, match=r"no tc's netem.*kind is unknown.*or drop --delay"):
        cluster_checks.check_kernel(isolation, needs_delay=True)


def test_rates_and_delays_are_read_as_tc_reads_them() -> None:
    read = [
        cluster_namespaces.parse_rate(text) for text in ("50mbit", "1Gbit", "500kbit", "1.5mbit")
    ]
    assert read == [50, 1000, 0.5, 1.5]
    delays = [cluster_namespaces.parse_delay(text) for text in (None, "5ms", "500us", "0.1s")]
    assert delays == [None, 5, 0.5, 100]


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


def test_steps_are_at_least_and_at_most_as_many_as_asked_for() -> None:
    points = points_of(["opt", "llama"], [1, 64], nodes=2, steps=(5, 100), repeats=2)
    assert [(p.run, p.architecture, p.steps) for p in points][:4] == [
        (0, "opt", 100),
        (0, "opt", 5),
        (0, "llama", 100),
        (0, "llama", 5),
    ]
    assert len({point.name for point in points}) == len(points) == 8


def test_the_volume_is_that_of_the_engine() -> None:
    assert [volume_coefficient(engine, 1) for engine in ENGINES] == [2, 3, 3]
    assert [volume_coefficient(engine, 4) for engine in ENGINES] == [2, 3, 9]
    assert gradient_bytes("zero2", "bf16", 1000) == 2000
    assert gradient_bytes("ddp", "bf16", 1000) == gradient_bytes("zero2", "fp32", 1000) == 4000
    volume = bytes_per_step("zero2", nodes=5, gradient_accumulation=4, gradient_bytes=1e6)
    assert volume == pytest.approx(9 * 0.8 * 1e6)
    # 50 Mbit/s are 5.98 MB/s of payload.
    assert link_seconds(5.977e6, 50) == pytest.approx(1, rel=1e-3)
    with pytest.raises(ConfigError, match="unknown --engine 'zero4'; did you mean 'zero2'"):
        volume_coefficient("zero4", 1)


def sweep_of(steps_s: dict[int, list[float]], **setup: Any) -> ClusterSweep:
    points = [
        ClusterPoint(
            architecture="opt",
            run=0,
            micro_batch=micro_batch,
            gradient_accumulation=1,
            num_parameters=1_000_000,
            gradient_bytes=2_000_000,
            rounds=len(step_s),
            first_step=0,
            step_s=step_s,
            target_s=sum(step_s),
            compute_step_s=[0.05, 0.07, 0.06],
            collectives_s=[0.02, 0.01, 0.03],
            tx_bytes_per_step=[4.82e6, 4.84e6],
            rx_bytes_per_step=[4.82e6, 4.84e6],
            expected_bytes_per_step=4.8e6,
            losses=[6.0] * len(step_s),
            losses_by_node=[[6.0] * len(step_s)] * 2,
        )
        for micro_batch, step_s in steps_s.items()
    ]
    values: dict[str, Any] = {
        "nodes": 5,
        "engine": "zero2",
        "precision": "bf16",
        "rate_mbit": 50.0,
        "delay_ms": None,
        "model_size": "mini",
        "block_size": 32,
        "target": 20,
        "target_over": "all",
        "activation_offload": True,
        "isolation": "root",
        "options": ["--seed", "1"],
        "load_average": 0.5,
    }
    return ClusterSweep(setup=ClusterSetup(**{**values, **setup}), points=points)


def test_table_and_plot_show_medians_speedups_and_the_prediction(tmp_path: Path) -> None:
    sweep = sweep_of({1: [2.0, 0.9, 1.0, 1.1], 4: [1.0]})
    assert sweep.points[0].steady_step_s == 1.0
    table = format_sweep(sweep)
    assert "5 nodes at 50 Mbit/s: zero2 in bf16, gloo, hf_pyao attached" in table
    (first,) = [line.split() for line in table.splitlines() if line.startswith("opt      ")][:1]
    assert first == ["opt", "1", "4", "1.000", "5.00", "1.00", "4.830", "4.800", "0.843"]
    assert predicted_step_s(sweep.setup, sweep.points[0]) == pytest.approx(0.04 + 0.803, abs=1e-3)
    (second,) = [line.split() for line in table.splitlines() if line.startswith("opt")][1:]
    assert second[3:6] == ["1.000", "1.00", "5.00"]  # a single step is all there is
    draw_sweep(sweep, tmp_path / "plots/sweep.png")
    assert (tmp_path / "plots/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_reads_back_and_nothing_else_does(tmp_path: Path) -> None:
    sweep = sweep_of({1: [2.0, 1.0]})
    path = tmp_path / "sweep.json"
    write_sweep(path, sweep)
    assert read_sweep(path) == sweep
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "kind": "estimate"}))
    with pytest.raises(ConfigError, match="holds 'estimate', version 2; expected 'local_cluster'"):
        read_sweep(path)
    document["points"][0]["round"] = document["points"][0].pop("rounds")
    path.write_text(json.dumps(document))
    with pytest.raises(
        ReportError, match=r"points\[0\] has the key 'round'.*did you mean 'rounds'"
    ):
        read_sweep(path)


def test_counters_are_those_of_the_interface(tmp_path: Path) -> None:
    path = tmp_path / "dev"
    path.write_text(
        "Inter-|   Receive\n face |bytes packets\n"
        "    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n"
        "  eth0: 11 2 0 0 0 0 0 0 13 3 0 0 0 0 0 0\n"
    )
    assert interface_bytes("eth0", str(path)) == (11, 13)
    assert interface_bytes("", str(path)) == (0, 0)


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None
    for step, is_whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if is_whole:
            (folder / "trainer_state.json").write_text("{}")
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


# ---- namespaces ----------------------------------------------------------------------------------

NETWORK = """
import json, subprocess, sys
from cluster.cluster_namespaces import *
run_tools([*network_commands(2), *shaping_commands(2, 5.0, None), *unshaping_commands(2)])
unshaped = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True).stdout
assert "tbf" not in unshaped, unshaped
run_tools(shaping_commands(2, 50.0, None))
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
        "interface": "eth0",
        "work_dir": "",
        "output_dir": None,
        "save_steps": 0,
        "resume": False,
    }
    return SupervisorSettings(
        node=NodeSettings(**values),
        delay_ms=None,
        port=29500,
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
def test_a_resumed_run_has_no_time_to_the_target(run_stub: RunStub) -> None:
    ((point,), _) = run_stub("begin(); steps(2, 3); emit('done')")
    assert (point.first_step, point.target_s) == (1, None)


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


@pytest.mark.thorough
def test_a_node_that_ends_without_a_word_is_the_cause(run_stub: RunStub) -> None:
    behaviour = "begin()\nif node == 2: time.sleep(0.5); os.kill(os.getpid(), 9)\n"
    with pytest.raises(ClusterError, match=r"node 2: its processes were ended by SIGKILL"):
        run_stub(behaviour + "emit('failed', error='reset by peer')")


@pytest.mark.thorough
def test_a_node_that_does_not_start_is_named(run_stub: RunStub) -> None:
    behaviour = "if node == 2: time.sleep(1000)\nbegin(); time.sleep(1000)"
    with pytest.raises(ClusterError, match=r"^node 2: it did not start within 1 s; all nodes"):
        run_stub(behaviour, start_timeout_s=1.0)


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
