"""Whether a micro-batch that failed may have written gradients of tensors that are not the model's.

[Note: Counting backwards]
Torch numbers backward passes, in all threads together. The engine knows the number of the newest
one that came to its layers. A tiny backward, run now, shows how many there have been since. If
there was none, or only the one that failed, its graph shows what it could write. Else every tensor
that has a gradient may have been written.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch


def newest_backward() -> int:
    """Return the number of the newest backward pass, which is a tiny one run here."""
    seen: list[int] = []
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        product = leaf * 1
        product.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))  # type: ignore[no-untyped-call]
        torch.autograd.grad(product, leaf)
    return seen[0]


def find_other(known: Iterable[torch.Tensor], failed: TracebackType | None) -> torch.Tensor | None:
    """Return a tensor that has a gradient which the micro-batch may have written; None if none has.

    Args:
        known: tensors whose gradients are known.
        failed: traceback of the only backward pass since the micro-batch began, which has failed;
            None: there were others.
    """
    ids = set(map(id, known))
    for each in gc.get_objects() if failed is None else _leaves_of(failed):
        if issubclass(type(each), torch.Tensor) and each.is_leaf and id(each) not in ids:
            tensor: torch.Tensor = each
            if tensor.requires_grad and tensor.grad is not None:
                return tensor
    return None


def _leaves_of(failed: TracebackType) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graph that ran backward in the frames of *failed*."""
    pending: list[Any] = []
    for frame, _ in traceback.walk_tb(failed):
        if frame.f_code.co_name == "_engine_run_backward":
            pending += [getattr(root, "grad_fn", None) for root in frame.f_locals["t_outputs"]]
    seen = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable
