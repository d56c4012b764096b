"""Network namespaces that are joined by a bridge, and links of a set rate.

Everything here is called inside of namespaces that end with their first process
(:func:`throw_away`): the kernel removes nodes, links and bridge then, however it ended. Nothing
leads out of them: there is no link to the machine's own network, and no route.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from cluster.cluster_settings import ADDRESS, INTERFACE
from hf_pyao.errors import ConfigError

BRIDGE = "switch"
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Where ip and tc are looked for: a user's PATH often lacks the folders for administration."""

_LARGEST_SEGMENT_BYTES = 64 * 1024
_UNITS = {"": 1e-6, "k": 1e-3, "m": 1.0, "g": 1e3}


def parse_rate(text: str) -> float:
    """Return a rate such as ``50mbit`` or ``1gbit`` in Mbit/s.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    rate_mbit = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 0.1 <= rate_mbit <= 1e5:
        raise ConfigError(
            f"--rate is {text!r}; expected a rate from 100kbit to 100gbit, such as 50mbit or 1gbit."
        )
    return rate_mbit


def throw_away(isolation: str) -> list[str]:
    """Return what to put before a command so that it runs in namespaces that end with it.

    Args:
        isolation: ``user namespace``, ``root`` or ``sudo``.
    """
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if isolation == "user namespace":
        return [*unshare, "--user", "--map-root-user"]
    return unshare if isolation == "root" else ["sudo", "-n", *unshare]


def tool_environment() -> dict[str, str]:
    """Return the environment in which tools are found."""
    return {**os.environ, "PATH": TOOL_PATH}


def find_tool(name: str) -> str | None:
    """Return the path of a tool; None if it is not installed."""
    return shutil.which(name, path=TOOL_PATH)


def node_name(node: int) -> str:
    """Return the name of a node's namespace."""
    return f"node{node}"


def in_node(node: int, *command: str) -> list[str]:
    """Return *command* as it runs in the namespace of *node*."""
    return ["ip", "netns", "exec", node_name(node), *command]


def network_commands(nodes: int) -> list[list[str]]:
    """Return the commands that make the nodes and join them by a bridge, links unshaped."""
    commands = [
        ["mount", "-t", "tmpfs", "none", "/run"],  # where ip keeps names; private to us
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", BRIDGE, "type", "bridge"],
        ["ip", "link", "set", BRIDGE, "up"],
    ]
    for node in range(nodes):
        port = f"port{node}"
        commands += [
            ["ip", "netns", "add", node_name(node)],
            [
                *("ip", "link", "add", port, "type", "veth"),
                *("peer", "name", INTERFACE, "netns", node_name(node)),
            ],
            ["ip", "link", "set", port, "master", BRIDGE],
            ["ip", "link", "set", port, "up"],
            in_node(node, "sh", "-c", _QUIET),
            in_node(node, "ip", "address", "add", f"{address(node)}/24", "dev", INTERFACE),
            in_node(node, "ip", "link", "set", "lo", "up"),
            in_node(node, "ip", "link", "set", INTERFACE, "up"),
        ]
    return commands


# No IPv6, whose announcements would be counted; and a congestion control that every kernel lets a
# namespace choose, so that machines are alike. A kernel without either is as good.
_QUIET = (
    "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6;"
    " echo reno > /proc/sys/net/ipv4/tcp_congestion_control; true"
)


def address(node: int) -> str:
    """Return a node's address."""
    return ADDRESS.format(10 + node)


def shaping_commands(nodes: int, rate_mbit: float) -> list[list[str]]:
    """Return the commands that give each link its rate, each way.

    A node sends at the rate, and the bridge sends to it at the rate: a port of a full-duplex
    switch.
    """
    commands = []
    for node in range(nodes):
        bucket = ("root", *_token_bucket(rate_mbit))
        commands.append(in_node(node, "tc", "qdisc", "replace", "dev", INTERFACE, *bucket))
        commands.append(["tc", "qdisc", "replace", "dev", f"port{node}", *bucket])
    return commands


def unshaping_commands(nodes: int) -> list[list[str]]:
    """Return the commands that undo :func:`shaping_commands`."""
    commands = []
    for node in range(nodes):
        commands.append(in_node(node, "tc", "qdisc", "delete", "dev", INTERFACE, "root"))
        commands.append(["tc", "qdisc", "delete", "dev", f"port{node}", "root"])
    return commands


def _token_bucket(rate_mbit: float) -> list[str]:
    # The bucket holds one largest segment, and what passes between two ticks of a slow clock.
    burst_bytes = int(max(_LARGEST_SEGMENT_BYTES + 4096, rate_mbit * 1e6 / 8 * 1e-3))
    rate_bit = f"{round(rate_mbit * 1e6)}bit"
    return ["tbf", "rate", rate_bit, "burst", str(burst_bytes), "latency", "100ms"]


def run_tools(commands: Sequence[Sequence[str]]) -> None:
    """Run *commands*, one after the other.

    Raises:
        ConfigError: one failed; says which, and what it said.
    """
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, env=tool_environment(), check=False
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise ConfigError(f"`{' '.join(command)}` failed: {said}")


def list_interfaces() -> list[str]:
    """Return the names of the interfaces in the namespace of this process."""
    command = ["ip", "-brief", "link"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=tool_environment(), check=True
    )
    return [line.split()[0].partition("@")[0] for line in done.stdout.splitlines()]


def kill_node(node: int) -> None:
    """End every process of a node by SIGKILL."""
    command = ["ip", "netns", "pids", node_name(node)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=tool_environment(), check=True
    )
    for pid in done.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def unplug_node(node: int) -> None:
    """Take a node's link down, as if its cable were drawn: nobody is told."""
    run_tools([["ip", "link", "set", f"port{node}", "down"]])
