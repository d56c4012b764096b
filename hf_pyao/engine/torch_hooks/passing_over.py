"""Forwards of a layer in which hooks stay off, and why.

[Note: Forwards inside a backward pass]
Recomputation runs layers inside a backward pass. What they save then is used at once, and stays on
the device. A checkpoint of torch's has its own hooks on top by then, and a reentrant one runs in
the backward of a custom autograd function, as those of other libraries do. Any other forward inside
a backward pass is independent of it, such as one in a tensor's hook that calls backward itself
(GradCache): it is offloaded.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.modules._functions import BackwardHookFunction

from hf_pyao.engine.torch_hooks.saved_tensor_hooks import is_inside_checkpoint
from hf_pyao.errors import warn

logger = logging.getLogger(__name__)

CHECKPOINTED = "the layers ran inside a checkpoint, which saves what it needs itself"
RECOMPUTED = (
    "the layers ran in the backward of a custom autograd function, which counts as recomputation, "
    "whose tensors are used at once"
)
HOOKS_DISABLED = (
    "the layers ran where saved-tensor hooks are forbidden "
    "(torch.autograd.graph.disable_saved_tensors_hooks; transforms such as torch.func.grad do that)"
)

CAPTURED = (
    "a CUDA graph is captured: its replays call no hooks, and nothing can leave its own memory "
    "(without torch.cuda.graph, and without mode='reduce-overhead' or 'max-autotune' of "
    "torch.compile, layers are offloaded)"
)
TRANSFORMED = (
    "the layers ran inside of a transform of torch.func (vmap, jvp), whose tensors have no memory "
    "of their own"
)


def is_recomputing() -> bool:
    """Say whether the forward that runs is a recomputation inside a backward pass."""
    return torch._C._current_graph_task_id() != -1 and (
        is_inside_checkpoint() or _is_in_custom_backward()
    )


def reason_to_pass_over() -> str | None:
    """Say why nothing is to be offloaded of the layer that is entered now; None if it may be."""
    if is_inside_checkpoint():
        return CHECKPOINTED
    if torch._C._current_graph_task_id() != -1 and _is_in_custom_backward():
        return RECOMPUTED
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return HOOKS_DISABLED
    if torch._C._are_functorch_transforms_active():
        return TRANSFORMED
    if is_capturing():
        return CAPTURED
    return None


def is_capturing() -> bool:
    """Say whether a CUDA graph is captured on the current stream."""
    has_device: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return has_device and torch.cuda.is_current_stream_capturing()


def explain_failure(error: BaseException | None, layer: str) -> None:
    """Log why *layer* failed, if it failed because our hooks are on."""
    traceback = None if error is None else error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_frame.f_code.co_name != "disable_saved_tensors_hooks":
        return
    warn(
        logger,
        "hooks-forbidden",
        "layer %r forbids saved-tensor hooks for a part of its forward "
        "(torch.autograd.graph.disable_saved_tensors_hooks, which torch.func.grad, vjp, jacrev and "
        "hessian call), and torch refuses that where hooks are on, as hf_pyao's are in every layer "
        "that it offloads. Train this model without offloading, or register a module map whose "
        "layers do not hold this part.",
        layer,
        level=logging.ERROR,
    )


def _is_in_custom_backward() -> bool:
    """Say whether the node that backward runs now was written in Python."""
    node: object = torch._C._current_autograd_node()
    if isinstance(node, BackwardHookFunction._backward_cls):
        return False  # a module's full backward hook
    return node is None or isinstance(node, torch.autograd.function.BackwardCFunction)
