"""The first process in the cluster's namespaces: makes the network, starts the nodes, watches them.

``../local_cluster.py`` starts it and is all that it talks to: settings come as one line of JSON on
the standard input, events leave as lines of JSON on the standard output. When the input ends,
whoever was to read the events is gone, and so is everything here: the namespaces end with this
process, and the kernel kills and removes what is in them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.cluster_namespaces import (
    address,
    in_node,
    kill_node,
    list_interfaces,
    network_commands,
    run_tools,
    shaping_commands,
    tool_environment,
    unplug_node,
    unshaping_commands,
)
from cluster.cluster_settings import (
    EVENT_PREFIX,
    INTERFACE,
    PORT,
    SupervisorSettings,
    links_reply,
)
from hf_pyao.errors import PyAOError
from hf_pyao.plan.documents.schema import read_fields

WORK_DIR = "/run/cluster"
"""In the namespaces' own /run, in memory, which nobody else sees."""

SILENCE_S = 600.0
"""Longest without an event of any node."""

LAST_WORDS_S = 10.0
"""Longest that nodes go on after one has failed: to say what they end with, if they can.

A node that waits for a lost one in a collective is told by gloo at once, or by the collective's own
limit; one that waits outside of a collective is never told."""

_LOG_LINES = 60
_INTO_STEP_S = 0.1
"""How far into a step a fault comes."""
_RECIPES = Path(__file__).resolve().parents[1]

Event = dict[str, Any]


def main() -> None:
    """Run the nodes, and end with them."""
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    settings = read_fields(SupervisorSettings, json.loads(line), "the supervisor's settings")
    supervisor = Supervisor(settings)
    try:
        supervisor.make_network()
        supervisor.start_nodes()
        outcome = supervisor.watch()
    except PyAOError as error:
        outcome = {"error": str(error), "nodes": {}, "logs": {}}
    send({"event": "end", **outcome})
    os._exit(0)


def _end_with_input() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def send(event: Event) -> None:
    """Write an event."""
    os.write(1, (json.dumps(event) + "\n").encode("utf-8"))


class Supervisor:
    """Nodes, and what is known of each."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self.settings = settings
        self.nodes = range(settings.node.nodes)
        self.events: queue.Queue[Event] = queue.Queue()
        self.logs = [deque[str](maxlen=_LOG_LINES) for _ in self.nodes]
        self.is_started = [False for _ in self.nodes]
        self.is_done = [False for _ in self.nodes]
        self.errors: dict[int, str] = {}
        """By node: why it ended before its work was done."""
        self.silent: list[int] = []
        """Of these, the nodes that ended without a word: what the others say follows from it."""
        self.first_error_at: float | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._fault_is_due = settings.fault is not None

    def make_network(self) -> None:
        """Make the namespaces and their links.

        Raises:
            ConfigError: a tool failed.
        """
        run_tools(network_commands(len(self.nodes)))
        send({"event": "network", "interfaces": list_interfaces()})
        Path(WORK_DIR).mkdir()

    def start_nodes(self) -> None:
        """Start ``accelerate launch`` in each node."""
        node_settings = dataclasses.replace(self.settings.node, work_dir=WORK_DIR)
        path = Path(WORK_DIR, "settings.json")
        path.write_text(json.dumps(dataclasses.asdict(node_settings)), encoding="utf-8")
        for node in self.nodes:
            process = subprocess.Popen(
                in_node(node, *self._launch_command(node, path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self._environment(),
                cwd=_RECIPES.parent,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(node, process), daemon=True).start()

    def _launch_command(self, node: int, path: Path) -> list[str]:
        return [
            *(self.settings.python, "-m", "accelerate.commands.launch"),
            *self.settings.launch_options,
            *("--machine_rank", str(node)),
            *("--main_process_ip", address(0), "--main_process_port", str(PORT)),
            *(str(_RECIPES / "cluster" / "cluster_node.py"), str(path)),
        ]

    def _environment(self) -> dict[str, str]:
        paths = [str(_RECIPES.parent), str(_RECIPES), os.environ.get("PYTHONPATH", "")]
        return {
            **tool_environment(),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # The host's name leads to 127.0.0.1 in every node: without this, gloo waits for ever.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }

    def _read(self, node: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(EVENT_PREFIX):
                self.events.put(json.loads(line.removeprefix(EVENT_PREFIX)))
            else:
                self.logs[node].append(line.rstrip())
        self.events.put({"event": "ended", "node": node, "status": process.wait()})

    def watch(self) -> Event:
        """Pass on the nodes' events until all have ended, or have had their time to.

        Returns:
            ``error`` (None: all is done), and by node what it ended with and its last lines.
        """
        begin = heard = time.monotonic()
        while not all(self.is_done[n] or n in self.errors for n in self.nodes):
            try:
                self._take(self.events.get(timeout=0.5))
                heard = time.monotonic()
            except queue.Empty:
                pass
            self._check_times(time.monotonic(), begin, heard)
        return self._outcome()

    def _take(self, event: Event) -> None:
        node, kind = int(event["node"]), event["event"]
        if kind == "started":
            self.is_started[node] = True
        elif kind == "done":
            self.is_done[node] = True
        elif kind == "failed":
            self._fail(node, str(event["error"]))
        elif kind == "ended":
            if not self.is_done[node]:
                if node not in self.errors:
                    self.silent.append(node)
                self._fail(node, _describe_status(int(event["status"])))
        elif kind == "links" and node == 0:
            self._set_links(bool(event["is_shaped"]))
            links_reply(WORK_DIR, int(event["change"])).touch()
        send(event)
        if self._fault_is_due:
            self._maybe_fault(event)

    def _fail(self, node: int, error: str) -> None:
        if self.first_error_at is None:
            self.first_error_at = time.monotonic()
        self.errors.setdefault(node, error)  # the first thing that a node says is the cause

    def _set_links(self, is_shaped: bool) -> None:
        settings, num_nodes = self.settings, len(self.nodes)
        if is_shaped:
            run_tools(shaping_commands(num_nodes, settings.node.rate_mbit))
        else:
            run_tools(unshaping_commands(num_nodes))

    def _maybe_fault(self, event: Event) -> None:
        fault = self.settings.fault
        assert fault is not None
        before = (event.get("point"), event.get("is_shaped"), event.get("step", 0))
        if event["node"] != fault.node or before != (0, True, fault.step - 1):
            return
        self._fault_is_due = False
        time.sleep(_INTO_STEP_S)
        send({"event": "fault", "node": fault.node, "kind": fault.kind, "step": fault.step})
        if fault.kind == "kill":
            kill_node(fault.node)
        else:
            unplug_node(fault.node)

    def _check_times(self, now: float, begin: float, heard: float) -> None:
        settings = self.settings
        if now - begin > settings.start_timeout_s and not all(self.is_started):
            for node in self.nodes:
                if not self.is_started[node]:
                    limit_s = settings.start_timeout_s
                    self._fail(node, f"it did not start within {limit_s:g} s")
        if now - heard > SILENCE_S:
            for node in self.nodes:
                self._fail(node, f"no node was heard of for {SILENCE_S:g} s")
        limit_s = min(LAST_WORDS_S, settings.node.timeout_s)
        if self.first_error_at is not None and now - self.first_error_at > limit_s:
            for node in self.nodes:
                if not self.is_done[node]:
                    self._fail(node, f"still running {limit_s:.0f} s later; ended by the launcher")

    def _outcome(self) -> Event:
        if not self.errors:
            return {"error": None, "nodes": {}, "logs": {}}
        first = next(iter([*self.silent, *self.errors]))
        after_s = time.monotonic() - (self.first_error_at or 0)
        return {
            "error": f"node {first}: {self.errors[first]}",
            "after_s": after_s,
            "nodes": {str(node): error for node, error in sorted(self.errors.items())},
            "logs": {str(node): list(self.logs[node]) for node in self.errors},
        }


def _describe_status(status: int) -> str:
    if status < 0:
        return f"its processes were ended by {signal.Signals(-status).name}"
    return f"it ended with status {status} before its work was done"


if __name__ == "__main__":
    main()
