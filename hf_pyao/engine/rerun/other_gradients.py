"""Whether a micro-batch that failed may have written gradients of tensors that are not the model's.

[Note: Counting backwards]
Torch numbers backward passes, in all threads together. The engine knows the number of the newest
one that came to its layers. A tiny backward, run now, shows how many there have been since. If
there was none, nothing was written. Else every tensor that has a gradient may have been.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

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


def find_other(known: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return a tensor that has a gradient, and is not among the *known* ones; None if none has."""
    ids = set(map(id, known))
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and id(each) not in ids:
            tensor: torch.Tensor = each
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                return tensor
    return None
