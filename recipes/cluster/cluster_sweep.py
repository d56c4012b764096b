"""A sweep from outside: plan its points, start the namespaces, follow events, gather figures."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from cluster.cluster_namespaces import throw_away, tool_environment
from cluster.cluster_result import ClusterPoint
from cluster.cluster_settings import NodeSettings, PointPlan, SupervisorSettings
from cluster.cluster_volume import gradient_bytes
from experiments.communication import find_engine, sent_bytes
from hf_pyao.errors import PyAOError

Event = dict[str, Any]

_SUPERVISOR = Path(__file__).with_name("cluster_supervisor.py")


class ClusterError(PyAOError, RuntimeError):
    """The nodes began, and did not finish."""


def plan_points(
    architectures: list[str],
    micro_batches: list[int],
    *,
    gradient_accumulation: int,
    nodes: int,
    target: int,
    target_over: str,
    steps: tuple[int, int | None],
    repeats: int,
) -> list[PointPlan]:
    """Return the points of a sweep, repetitions on the outside: a disturbance meets one of them.

    Args:
        architectures: models.
        micro_batches: of one node.
        gradient_accumulation: micro-steps in an optimizer step.
        nodes: how many.
        target: samples to accumulate.
        target_over: ``all`` nodes together, or each ``node``.
        steps: at least so many optimizer steps, and at most (None: as the target needs).
        repeats: how often.
    """
    least, most = steps
    points = []
    for run in range(repeats):
        for architecture in architectures:
            for micro_batch in micro_batches:
                samples = micro_batch * gradient_accumulation
                samples *= nodes if target_over == "all" else 1
                rounds = math.ceil(target / samples)
                num_steps = max(rounds, least)
                points.append(
                    PointPlan(
                        architecture=architecture,
                        run=run,
                        micro_batch=micro_batch,
                        gradient_accumulation=gradient_accumulation,
                        rounds=rounds,
                        steps=num_steps if most is None else min(num_steps, most),
                    )
                )
    return points


def run_sweep(
    settings: SupervisorSettings, isolation: str, on_event: Callable[[Event], None]
) -> list[ClusterPoint]:
    """Run every point on the nodes of a cluster, in namespaces that end with this call.

    Args:
        settings: of the supervisor and its nodes.
        isolation: how namespaces are made here.
        on_event: called with each event, as it comes.

    Raises:
        ClusterError: a node failed; says which, and what it said.
    """
    gathered = Gathered(settings.node)
    with _supervisor(settings, isolation) as events:
        for event in events:
            gathered.take(event)
            on_event(event)
            if event["event"] == "end":
                if event["error"] is not None:
                    raise ClusterError(describe_failure(event, gathered.fault))
                return gathered.points()
    raise ClusterError("the process that watches the nodes was ended from outside, and they too.")


@contextmanager
def _supervisor(settings: SupervisorSettings, isolation: str) -> Iterator[Iterator[Event]]:
    """Start the supervisor; its events. It ends with the block, and its namespaces with it."""
    process = subprocess.Popen(
        [*throw_away(isolation), sys.executable, str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**tool_environment(), "PYTHONPATH": _python_path()},
        start_new_session=True,  # Ctrl-C is for this process, which ends that one
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = json.dumps(dataclasses.asdict(settings)) + "\n"
        process.stdin.write(line.encode("utf-8"))
        process.stdin.flush()
        yield map(json.loads, process.stdout)
    finally:
        process.stdin.close()  # what it ends by
        process.stdout.close()
        process.wait()


def _python_path() -> str:
    return ":".join(str(Path(path).resolve()) for path in sys.path if path)


def write_logs(folder: Path, logs: dict[str, list[str]]) -> None:
    """Write each failed node's last lines to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for node, lines in logs.items():
        (folder / f"node{node}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")


def describe_failure(end: Event, fault: Event | None) -> str:
    """Return what went wrong: the cause in one line, and what each other node ended with."""
    nodes = dict(end["nodes"])
    lines = [end["error"]]
    if fault is not None:
        verb = {"kill": "killed", "unplug": "unplugged"}[fault["kind"]]
        lines = [f"node {fault['node']} was {verb} in step {fault['step']}, as asked for"]
        nodes.pop(str(fault["node"]), None)
    else:
        nodes.pop(end["error"].partition(":")[0].removeprefix("node "), None)
    if nodes:
        lines[0] += f"; all nodes had ended {end['after_s']:.1f} s after the first did"
        lines += [f"  node {node}: {error}" for node, error in nodes.items()]
    return "\n".join(lines)


class Gathered:
    """What the events of a sweep have told so far."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.fault: Event | None = None
        self._num_parameters: dict[int, int] = {}
        self._collectives_s: dict[int, list[float]] = {}
        self._steps: defaultdict[tuple[int, bool, int], list[Event]] = defaultdict(list)

    def take(self, event: Event) -> None:
        """Note an event."""
        if event["event"] == "point":
            self._num_parameters[event["point"]] = event["num_parameters"]
        elif event["event"] == "step":
            self._steps[event["point"], event["is_shaped"], event["node"]].append(event)
        elif event["event"] == "collectives" and event["node"] == 0:
            self._collectives_s[event["point"]] = event["seconds"]
        elif event["event"] == "fault":
            self.fault = event

    def points(self) -> list[ClusterPoint]:
        """Return the figures of every point that took a step."""
        plans = self.settings.points
        return [
            self._point(index, plan)
            for index, plan in enumerate(plans)
            if self._steps[index, True, 0]
        ]

    def _point(self, index: int, plan: PointPlan) -> ClusterPoint:
        settings = self.settings
        by_node = [self._steps[index, True, node] for node in range(settings.nodes)]
        losses = [[event["loss"] for event in steps] for steps in by_node]
        seconds = [event["seconds"] for event in by_node[0]]
        is_whole = by_node[0][0]["step"] == 1 and len(seconds) >= plan.rounds
        num_parameters = self._num_parameters[index]
        one = gradient_bytes(settings.engine, settings.precision, num_parameters)
        return ClusterPoint(
            architecture=plan.architecture,
            run=plan.run,
            micro_batch=plan.micro_batch,
            gradient_accumulation=plan.gradient_accumulation,
            num_parameters=num_parameters,
            gradient_bytes=one,
            rounds=plan.rounds,
            first_step=by_node[0][0]["step"] - 1,
            step_s=seconds,
            target_s=sum(seconds[: plan.rounds]) if is_whole else None,
            compute_step_s=[e["seconds"] for e in self._steps[index, False, 0]][1:] or None,
            collectives_s=self._collectives_s.get(index),
            tx_bytes_per_step=[_mean_of(steps, "tx_bytes") for steps in by_node],
            rx_bytes_per_step=[_mean_of(steps, "rx_bytes") for steps in by_node],
            expected_bytes_per_step=sent_bytes(
                find_engine(settings.engine), settings.nodes, one, plan.gradient_accumulation
            ),
            losses=[fmean(step) for step in zip(*losses, strict=True)],
            losses_by_node=losses,
        )


def _mean_of(steps: list[Event], key: str) -> float:
    return fmean(event[key] for event in (steps[1:] or steps))
