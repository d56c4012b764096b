"""Which backward pass the calling thread is in."""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_TASK = -1
"""Id of the graph task outside of a backward pass."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of autograd's graph task that runs on this thread: one per call of backward."""


def is_in_backward() -> bool:
    """Say whether this thread is in a backward pass."""
    return current_graph_task() != NO_TASK
