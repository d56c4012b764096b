"""What is checked before a local cluster starts: tools, privileges, kernel, packages, settings.

Each check raises a ConfigError of one line. None leaves anything behind: what has to be tried is
tried in namespaces that end with the try.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

from cluster.cluster_namespaces import find_tool, throw_away, tool_environment
from cluster.cluster_settings import Fault
from hf_pyao.errors import ConfigError

MOST_NODES = 64

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
_TRY_S = 20


def check_system() -> None:
    """Refuse a system without the tools.

    Raises:
        ConfigError: names the tool, and the package it is in.
    """
    for tool, package in _PACKAGES.items():
        if find_tool(tool) is None:
            raise ConfigError(
                f"`{tool}` is not installed, and the nodes' network is made with it. "
                f"It is in the package {package} of most Linux distributions."
            )


def find_isolation() -> str:
    """Return how namespaces can be made here: ``user namespace``, ``root`` or ``sudo``.

    Raises:
        ConfigError: in no way; says what each way failed with.
    """
    ways = ["user namespace", "root" if os.geteuid() == 0 else "sudo"]
    reasons = []
    for way in ways:
        if way == "sudo" and find_tool("sudo") is None:
            reasons.append("sudo: not installed")
        elif (reason := _try_out(way, "true")) is None:
            return way
        else:
            reasons.append(f"{way}: {reason}")
    raise ConfigError(
        f"network namespaces cannot be made here ({'; '.join(reasons)}). Allow unprivileged user "
        "namespaces, or run as root; in a container, give it the capability SYS_ADMIN."
    )


def check_kernel(isolation: str) -> None:
    """Refuse a kernel that lacks what the network is made of.

    Raises:
        ConfigError: names what is lacking, and what to do without it.
    """
    tries = [
        ("bridges", "ip link add b0 type bridge", "Load the module `bridge`."),
        ("veth pairs", "ip link add v0 type veth peer name v1", "Load the module `veth`."),
        (
            "tc's tbf, which gives links their rate",
            "tc qdisc add dev lo root tbf rate 1mbit burst 70000 latency 100ms",
            "Load the module `sch_tbf`.",
        ),
    ]
    for what, command, remedy in tries:
        if (reason := _try_out(isolation, command)) is not None:
            raise ConfigError(f"this kernel has no {what} (`{command}`: {reason}). {remedy}")


def _try_out(isolation: str, command: str) -> str | None:
    """Run a shell command in namespaces of its own; return why it failed, None if it did not."""
    try:
        done = subprocess.run(
            [*throw_away(isolation), "sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            env=tool_environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"exit status {done.returncode}"


def choose_engine(engine: str | None) -> str:
    """Return the engine to use: the one asked for, else ZeRO-2 where DeepSpeed is installed.

    Raises:
        ConfigError: the one asked for needs DeepSpeed, which is not installed.
    """
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if engine is None:
        return "zero2" if has_deepspeed else "ddp"
    if engine != "ddp" and not has_deepspeed:
        raise ConfigError(
            f"--engine {engine} needs DeepSpeed, which is not installed: "
            "pip install 'hf_pyao[deepspeed]'. Or give --engine ddp."
        )
    return engine


def check_nodes(nodes: int, fault: Fault | None) -> None:
    """Refuse numbers that cannot be.

    Raises:
        ConfigError: says which.
    """
    if not 2 <= nodes <= MOST_NODES:
        raise ConfigError(f"--nodes is {nodes}; expected 2 to {MOST_NODES}.")
    if fault is not None and not 0 <= fault.node < nodes:
        raise ConfigError(f"--kill-node is {fault.node}; the nodes are 0 to {nodes - 1}.")
    if fault is not None and fault.step < 1:
        raise ConfigError(f"--kill-at-step is {fault.step}; expected 1 or more.")


_DISTRIBUTED_TYPES = {"ddp": "MULTI_GPU", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED"}


def read_launch_options(path: str, nodes: int, engine: str) -> list[str]:
    """Return the options of ``accelerate launch`` that make it read the file at *path*.

    Raises:
        ConfigError: the file cannot be read, or is for other nodes or another engine.
    """
    import yaml  # type: ignore[import-untyped]  # accelerate reads its configuration with it

    try:
        config: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(
            f"cannot read --config {path!r}: {reason}. Give a file of recipes/configs."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path!r} holds no settings. Give a file of recipes/configs.")
    for name in ("num_machines", "num_processes"):
        if config.get(name) != nodes:
            raise ConfigError(
                f"--nodes is {nodes}, and {path!r} is for {config.get(name)} ({name}). Give "
                f"--nodes {config.get(name)}, or change the file."
            )
    kind = config.get("distributed_type")
    if kind != _DISTRIBUTED_TYPES[engine]:
        raise ConfigError(
            f"--engine {engine} is {_DISTRIBUTED_TYPES[engine]} to accelerate, and {path!r} says "
            f"distributed_type: {kind}. Give the engine that the file is for."
        )
    return ["--config_file", str(Path(path).resolve())]
