"""A node of a local cluster that does not train: what it says is what the test wants to be said.

Stands where the nodes' Python would. Every behaviour begins with the events that a node begins with.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STUB = f"""#!{sys.executable} -S
import json, os, subprocess, sys, time
node = int(sys.argv[sys.argv.index("--machine_rank") + 1])
def emit(event, **content):
    line = "@cluster " + json.dumps({{"event": event, "node": node, **content}}) + "\\n"
    os.write(1, line.encode())
def steps(first, last, is_shaped=True):
    for step in range(first, last + 1):
        emit("step", point=0, is_shaped=is_shaped, step=step, seconds=0.1 * step, rx_bytes=90,
             tx_bytes=100 if step > 1 else 1000, loss=float(node + step))
def begin():
    print("a line of the log")
    emit("started")
    emit("links", is_shaped=True, change=0)
    while not os.path.exists("/run/cluster/links_0"):
        time.sleep(0.01)
    emit("point", point=0, is_shaped=True, num_parameters=1000)
"""


def write_stub(path: Path, behaviour: str) -> str:
    """Write a node that does *behaviour*, Python code, and return its path."""
    path.write_text(STUB + behaviour)
    path.chmod(0o755)
    return str(path)


def processes_with(text: str) -> list[int]:
    """Return the processes of this machine that have *text* in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def wait_until_gone(text: str, seconds: float = 10.0) -> None:
    """Wait until no process has *text* in its command line.

    Raises:
        AssertionError: some still have.
    """
    end = time.monotonic() + seconds
    while found := processes_with(text):
        assert time.monotonic() < end, found
        time.sleep(0.05)
