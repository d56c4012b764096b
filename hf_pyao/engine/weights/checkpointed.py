"""What graphs hold of streamed weights where the engine's hooks do not see them.

A checkpoint holds all that a layer's second run saves until the layer's backward is done. Where the
layer is one block, its slot is in use until then anyway. A layer of several blocks would keep all
of them on the device: so weights are kept from the checkpoint, in the first run as in the second,
and are saved as what brings them again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_pyao.engine.torch_hooks.saved_tensor_hooks import (
    hooks_of_checkpoint,
    is_inside_checkpoint,
    pack_hook,
    pop_hooks,
    push_hooks,
    topmost_hooks,
)
from hf_pyao.engine.transfer.graph_task import NO_TASK, current_graph_task

Find = Callable[[Tensor], Callable[[], Tensor] | None]
_Hooks = tuple[Callable[..., Any], Callable[..., Any]] | None


class _Weight:
    """Stands for a saved view of a streamed weight."""

    __slots__ = ("give",)

    def __init__(self, give: Callable[[], Tensor]) -> None:
        self.give = give


@contextlib.contextmanager
def weights_kept_from_checkpoints(find: Find, layer: str) -> Iterator[None]:
    """Save the weights of a module as what brings them, where a checkpoint would hold them.

    Elsewhere it does nothing: the engine's hooks do that.

    Args:
        find: returns what gives a tensor again, if it is of a streamed weight.
        layer: what messages call it.
    """
    checkpoint = hooks_of_checkpoint()
    # A reentrant checkpoint runs the layer again in backward without hooks.
    runs_again = current_graph_task() != NO_TASK and topmost_hooks() is None
    if not torch.is_grad_enabled() or (checkpoint is None and not runs_again):
        yield
        return
    with weights_kept_from_graphs(find, layer):
        yield


@contextlib.contextmanager
def weights_kept_from_graphs(find: Find, name: str) -> Iterator[None]:
    """Save weights as what brings them; other tensors are saved as they would be without this.

    Args:
        find: returns what gives a tensor again, if it is of a streamed weight.
        name: what messages call the module.
    """
    outer = topmost_hooks()
    hook = pack_hook(_pack, (find, outer), is_second_run=is_inside_checkpoint())
    try:
        push_hooks(hook, functools.partial(_unpack, outer))
        yield
    finally:
        pop_hooks(hook, name)


def _pack(known: tuple[Find, _Hooks], tensor: Tensor) -> Any:
    find, outer = known
    give = find(tensor)
    if give is not None:
        return _Weight(give)
    if outer is not None:
        return outer[0](tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _unpack(outer: _Hooks, saved: Any) -> Any:
    if type(saved) is _Weight:
        return saved.give()
    return saved if outer is None else outer[1](saved)
