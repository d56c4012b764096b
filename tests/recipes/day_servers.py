"""Processes of the GPU day that measure nothing: tasks fail in the way that their name says."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

TASKS = ("first", "killed", "second", "exits", "third", "hangs", "fourth")


def serve(connection: Connection, request: Any) -> None:
    """Do the tasks that are not done: one is killed, one ends the process, one hangs."""
    if request.part == "B":  # a driver that cannot be had
        os._exit(5)
    for task in TASKS:
        if task in request.done:
            continue
        connection.send(("begin", task))
        if task == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "exits":
            os._exit(7)
        if task == "hangs":
            time.sleep(600)
        line = {"name": task, "status": "ok", "figures": {"process": os.getpid()}, "wall_s": 0.0}
        connection.send(("line", line))
        if task == "third":
            return  # the device cannot be used any more
    connection.send(("end", None))
