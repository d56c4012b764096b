"""Whether a micro-batch that failed may have written gradients of tensors that are not the model's.

[Note: Counting backwards]
Torch numbers backward passes, in all threads together. The engine knows the number of the newest
one that came to its layers. A tiny backward, run now, shows how many there have been since. If
there was none, or only the one that failed, its graph shows what it could write. Only if there were
others, every tensor that has a gradient may have been written.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
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


def find_other(
    known: set[int], num_backwards: int, traceback: TracebackType | None, *, in_backward: bool
) -> torch.Tensor | None:
    """Return a tensor that has a gradient which the micro-batch may have written; None if none has.

    Args:
        known: ids of the tensors whose gradients are known.
        num_backwards: backward passes since the micro-batch began.
        traceback: of its failure.
        in_backward: whether it failed in one of them.
    """
    if num_backwards <= 0:
        return None
    if num_backwards == 1 and in_backward:
        suspects = _leaves_of_failed(traceback)
    else:
        suspects = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    for tensor in suspects:
        if (
            tensor.requires_grad
            and tensor.is_leaf
            and id(tensor) not in known
            and tensor.grad is not None
        ):
            return tensor
    return None


def _leaves_of_failed(traceback: TracebackType | None) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graphs that *traceback* ran backward."""
    pending: list[Any] = []
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "_engine_run_backward":
            for root in frame.f_locals.get("t_outputs", ()):
                pending.append(root.grad_fn if isinstance(root, torch.Tensor) else root.node)
        traceback = traceback.tb_next
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        pending += [following for following, _ in node.next_functions]
