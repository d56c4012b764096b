"""``pyao doctor``: what this machine can do for offloading, and what to change."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_pyao.engine.stores import available_host_bytes
from hf_pyao.engine.stores.disk_speed import DiskSpeed, measure_disk
from hf_pyao.engine.stores.numa import cores_of_node, node_of_pci_device
from hf_pyao.plan.documents.bench import FactsReport
from hf_pyao.plan.documents.provenance import collect_provenance, package_versions
from hf_pyao.plan.hardware.device_speed import DeviceSpeed
from hf_pyao.plan.hardware.link_speed import LinkSpeed
from hf_pyao.tools.bench.processes import broken_packages, probe
from hf_pyao.tools.packages import REMEDY, Broken

GIB = 2**30
WINDOW_MS = 10.0
"""Recommended window: as much as the link moves in this time. Long enough to bridge a layer that
computes little, short enough to cost little memory."""

SLOW_LINK_GIB_PER_S = 10.0
"""Below this, a GPU is in a narrow slot or the host memory is far away."""

# By package: the oldest and the newest release that the tests ran with.
TESTED = {
    "torch": ("2.9", "2.13"),
    "transformers": ("4.57.1", "5.24"),
    "accelerate": ("1.11", "1.15"),
    "peft": ("0.17.1", "0.21"),
    "trl": ("0.24", "1.16"),
}


@dataclass(frozen=True)
class Finding:
    """One fact, and what follows from it."""

    name: str
    value: Any
    advice: str = ""
    """What to do; empty if nothing."""


@dataclass(frozen=True)
class Machine:
    """What was found on the machine, before anything is concluded from it."""

    device: dict[str, Any]
    """``hf_pyao.tools.bench.worker.describe_device``."""
    link: dict[str, float | None]
    """``hf_pyao.plan.hardware.link_speed.LinkSpeed``."""
    has_mps: bool
    device_node: int | None
    """NUMA node that the device hangs on."""
    device_cores: frozenset[int]
    """Cores of that node."""
    own_cores: frozenset[int]
    """Cores that this process may run on."""
    locked_bytes: int | None
    """Most memory that this process may lock; None: no limit, or none known."""
    available_bytes: int
    """Host memory that is free for this process."""
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    """What the device's kernels reach."""
    disk: DiskSpeed | None = None
    """What the disk of a folder reaches; None: no folder was given."""
    broken: tuple[Broken, ...] = ()
    """Packages that are installed, and cannot be imported."""


def look(device: str = "auto", disk: str | None = None) -> Machine:
    """Look at the machine; the device is looked at from a process of its own.

    Args:
        device: a name of torch's, or ``"auto"``.
        disk: a folder whose disk is measured; None: none is.

    Raises:
        ConfigError: the device cannot be had, or the folder cannot be used.
        DiskError: a file in the folder cannot be written or read.
    """
    import torch

    facts, link, speed = probe(device, with_speeds=True)
    node = node_of_pci_device(facts["pci_bus"]) if "pci_bus" in facts else None
    return Machine(
        device=facts,
        link=link,
        speed=DeviceSpeed(**speed),
        has_mps=torch.backends.mps.is_available(),
        device_node=node,
        device_cores=frozenset() if node is None else cores_of_node(node),
        own_cores=_own_cores(),
        locked_bytes=locked_limit_bytes(),
        available_bytes=available_host_bytes(),
        disk=None if disk is None else measure_disk(disk, "--disk"),
        broken=tuple(broken_packages()),
    )


def examine(machine: Machine) -> list[Finding]:
    """Return all findings on *machine*."""
    steps: Sequence[Callable[[Machine], list[Finding]]] = (
        *(_device, _speed, _link, _host, _disk, _numa, _versions, _broken),
    )
    return [finding for step in steps for finding in step(machine)]


def report_of(machine: Machine, findings: Sequence[Finding], verdict: str = "") -> FactsReport:
    """Return the findings as a document."""
    return FactsReport(
        title=f"What hf_pyao finds on {machine.device['name']}",
        facts={
            **{finding.name: finding.value for finding in findings},
            "advice": [finding.advice for finding in findings if finding.advice],
            **({"verdict": verdict} if verdict else {}),
        },
        provenance=collect_provenance(),
    )


def render(findings: Sequence[Finding], verdict: str = "") -> str:
    """Return the findings for a terminal, then the advice, and the verdict at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{finding.name:<{width}}  {_text(finding.value)}" for finding in findings]
    advice = [f"- {finding.advice}" for finding in findings if finding.advice]
    end = ["", verdict] if verdict else []
    return "\n".join([*lines, "", *(advice or ["Nothing to change."]), *end])


# ---- what follows from what --------------------------------------------------------------------


def _device(machine: Machine) -> list[Finding]:
    name, memory_gib = machine.device["name"], machine.device["memory_gib"]
    if memory_gib is not None:
        driver = machine.device.get("driver")
        found = [Finding("device", f"{name}, {memory_gib:.1f} GiB")]
        context_gib = machine.device.get("context_gib")
        if context_gib is not None:
            what = f"{context_gib:.2f} GiB: the CUDA context, and other processes"
            found.append(Finding("not for tensors", what))
        return [*found, Finding("driver", driver)] if driver else found
    if machine.has_mps:
        return [
            Finding(
                "device",
                "MPS, unified memory",
                "MPS has the host's memory: offloading frees nothing there, and hf_pyao refuses "
                "it. Use checkpointing on this machine.",
            )
        ]
    return [
        Finding(
            "device",
            "none: CPU only",
            "Without an accelerator the host stands in for the device: everything runs, bytes are "
            "counted, and no memory is saved. Good for trying a setup; train on a GPU.",
        )
    ]


def _speed(machine: Machine) -> list[Finding]:
    speed = machine.speed
    if speed.tflop_per_s is None or speed.memory_gib_per_s is None:
        return []
    return [
        Finding("matrix products, bfloat16", f"{speed.tflop_per_s:.0f} TFLOP/s"),
        Finding("device memory", f"{speed.memory_gib_per_s:.0f} GiB/s"),
    ]


def _link(machine: Machine) -> list[Finding]:
    d2h, h2d = machine.link.get("d2h_gib_per_s"), machine.link.get("h2d_gib_per_s")
    both, pageable = machine.link.get("both_gib_per_s"), machine.link.get("d2h_pageable_gib_per_s")
    if d2h is None or h2d is None or both is None:
        return []
    findings = [
        Finding(
            "link, to the host",
            f"{d2h:.1f} GiB/s pinned"
            + ("" if pageable is None else f", {pageable:.1f} GiB/s pageable"),
            ""
            if min(d2h, h2d) >= SLOW_LINK_GIB_PER_S
            else f"The link moves {min(d2h, h2d):.1f} GiB/s, which a full PCIe 4.0 x16 slot more "
            "than doubles: look whether the GPU sits in a narrower slot, and at NUMA below. On a "
            "slow link offload less: policy='modules', or checkpointing under hf_pyao.",
        ),
        Finding("link, to the device", f"{h2d:.1f} GiB/s pinned"),
    ]
    findings.append(
        Finding(
            "link, both at once",
            f"{both:.1f} GiB/s"
            + (
                ""
                if LinkSpeed(**machine.link).is_duplex
                else ": the directions share one engine or bus"
            ),
        )
    )
    window_mib = max(1, round(min(d2h, h2d) * GIB * WINDOW_MS / 1e3 / 2**20 / 16)) * 16
    findings.append(
        Finding(
            "window to start with",
            f"{window_mib} MiB ({WINDOW_MS:.0f} ms of the link)",
            f"Start with window={window_mib * 2**20} (--activation_offload_window), and compare "
            "with window='layer' by `pyao bench`.",
        )
    )
    return findings


def _host(machine: Machine) -> list[Finding]:
    available_gib = machine.available_bytes / GIB
    findings = [
        Finding(
            "host memory available",
            f"{available_gib:.1f} GiB; saved tensors may take half of it by default, all ranks of "
            "the node together (host_memory_gib)",
            ""
            if available_gib >= 8
            else "Little host memory is left: what does not fit stays on the device. Free some, "
            "or raise the container's limit.",
        )
    ]
    if machine.locked_bytes is None:
        return [*findings, Finding("locked memory (ulimit -l)", "no limit")]
    locked_gib = machine.locked_bytes / GIB
    is_short = machine.device["memory_gib"] is not None and locked_gib < available_gib / 2
    advice = (
        f"At most {locked_gib:.2f} GiB may be locked. CUDA's own pinning is not bound by it as a "
        "rule, other ways to pin are; where pinning fails hf_pyao warns and goes on with pageable "
        "memory, which does not overlap. Raise it: `ulimit -l unlimited`, or --ulimit memlock=-1 "
        "for a container."
    )
    value = f"{locked_gib:.2f} GiB"
    return [*findings, Finding("locked memory (ulimit -l)", value, advice if is_short else "")]


def _disk(machine: Machine) -> list[Finding]:
    speed, h2d = machine.disk, machine.link.get("h2d_gib_per_s")
    if speed is None:
        return []
    how = "past the page cache" if speed.is_direct else "no direct requests: pages were dropped"
    sample = f"{speed.nbytes / GIB:.1f} GiB in requests of 8 MiB, four at once; {how}"
    advice = ""
    if h2d is not None and speed.read_gib_per_s < h2d:
        advice = (
            f"Frozen weights come from this disk at {speed.read_gib_per_s:.2f} GiB/s, and from "
            f"host memory at {h2d:.1f}: give disk_path for what host memory cannot hold. `pyao "
            f"estimate --lora --host-memory SIZE --disk {speed.read_gib_per_s:.2f}GiB/s` says what "
            "a step takes."
        )
    return [
        Finding("disk, read", f"{speed.read_gib_per_s:.2f} GiB/s ({sample})", advice),
        Finding("disk, write", f"{speed.write_gib_per_s:.2f} GiB/s, flushed"),
    ]


def _numa(machine: Machine) -> list[Finding]:
    if machine.device_node is None:
        return []
    node = machine.device_node
    is_far = bool(machine.device_cores) and not machine.own_cores & machine.device_cores
    return [
        Finding(
            "NUMA node of the device",
            node,
            "All cores that this process may use are on other NUMA nodes than the device, so its "
            "memory is too, and copies cross between processors: start it with "
            f"numactl --cpunodebind={node} --preferred={node} ..."
            if is_far
            else "",
        )
    ]


def _versions(machine: Machine) -> list[Finding]:
    from torch.torch_version import TorchVersion

    findings, versions = [], package_versions()
    for name, (least, newest) in TESTED.items():
        version, advice, state = versions[name], "", "tested"
        if version is None:
            if name not in ("peft", "trl"):
                findings.append(Finding(name, "not installed", f"Install {name} {least} or newer."))
            continue
        if TorchVersion(version) < least:
            state = "older than tested"
            advice = f"hf_pyao is tested from {name} {least} on; {version} is older."
        elif TorchVersion(version) > f"{newest}.99":
            state = f"newer than tested ({newest})"
        findings.append(Finding(name, f"{version}, {state}", advice))
    return findings


def _broken(machine: Machine) -> list[Finding]:
    return [
        Finding(broken.package, "broken", f"{broken}, and what imports it fails too. {REMEDY}")
        for broken in machine.broken
    ]


# ---- looking -----------------------------------------------------------------------------------


def locked_limit_bytes() -> int | None:
    """Return the most bytes that this process may lock; None: no limit, or none known."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _own_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _text(value: Any) -> str:
    return "unknown" if value is None else str(value)
