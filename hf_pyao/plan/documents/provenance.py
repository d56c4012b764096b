"""Where a figure comes from: command, source, versions, machine. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hf_pyao import version

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "transformer-engine",
    "triton",
    "liger-kernel",
)
"""Packages whose versions decide a figure."""

ENVIRONMENT = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that change speed or memory."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What one would need to measure the same again."""

    command: str
    """The command line, its program by file name alone."""
    created_at: str
    """When it began: ISO 8601, UTC."""
    commit: str | None
    """Git commit of hf_pyao's source; None outside of a checkout."""
    is_dirty: bool | None
    """Whether tracked files differed from that commit."""
    source_sha256: str
    """Digest of hf_pyao's Python files, the same wherever they lie."""
    versions: dict[str, str | None]
    """Python and package versions; None: not installed."""
    host: dict[str, Any]
    """Processor, cores and memory (GiB, 2**30 bytes)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that change speed or memory, where they are set."""


def collect_provenance() -> Provenance:
    """Return the provenance of this process."""
    argv = sys.argv
    commit, is_dirty = git_state()
    return Provenance(
        command=shlex.join([_program(argv[0]), *argv[1:]]) if argv else "",
        created_at=now(),
        commit=commit,
        is_dirty=is_dirty,
        source_sha256=source_digest(),
        versions=package_versions(),
        host=describe_host(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def _program(path: str) -> str:
    """Return what a user types to run the file *path*."""
    name = Path(path).name
    return "pyao" if name == "cli.py" else name or "python"


def now() -> str:
    """Return the time, as ISO 8601 in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python, hf_pyao and :data:`PACKAGES`; None for what is missing."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "hf_pyao": version.__version__,
    }
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _package() -> Path:
    """Return the folder of hf_pyao's source."""
    return Path(version.__file__).resolve().parent


def git_state() -> tuple[str | None, bool | None]:
    """Return the commit of hf_pyao's source and whether it was changed since; None if unknown."""
    package = _package()
    # A checkout of something else may surround an installed hf_pyao; one that tracks it counts.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def source_digest() -> str:
    """Return a digest (16 hex digits of SHA-256) of hf_pyao's Python files and their names."""
    package = _package()
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def describe_host() -> dict[str, Any]:
    """Return the processor's name, the cores this process may use, and the memory in GiB."""
    memory_bytes = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 0)
    )
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "num_cores": cores,
        "memory_gib": None if memory_bytes is None else round(memory_bytes / 2**30, 1),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
