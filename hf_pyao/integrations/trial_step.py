"""A step that is tried: it may run out of memory, and leaves nothing behind either way.

Parameters are only read, gradients are laid aside, buffers are put back, random numbers, modes of
modules and the allocator's unused memory are as before. No optimizer takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import ConflictError
from hf_pyao.integrations.attach import attach
from hf_pyao.integrations.model_copy import loss_of
from hf_pyao.integrations.quiet import quiet
from hf_pyao.rerun.generators import RandomState


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a step that was tried."""

    has_run: bool
    """False: it ran out of memory."""
    peak_bytes: int | None = None
    """Most that was allocated on the device meanwhile; None on a CPU."""


def try_step(
    model: nn.Module,
    config: PyAOConfig,
    batch: Callable[[], dict[str, Any]],
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    num_runs: int,
    reserved_bytes: int,
) -> Trial:
    """Run forward and backward of *model* under *config*, and undo it.

    Args:
        model: not wrapped, not attached.
        config: what is offloaded, and how.
        batch: makes the keyword arguments that the model is called with, on its device.
        autocast: makes what is around the forward.
        num_runs: 2: the second finds gradients there, as behind another micro-batch.
        reserved_bytes: held on the device meanwhile, for what training will have there besides.

    Raises:
        ConflictError: the optimizer steps in backward.
    """
    device = next(model.parameters()).device
    check_undoable(model)
    with undisturbed(model, device):
        has_run, peak_bytes = False, None
        try:
            peak_bytes = _run(model, config, batch, autocast, num_runs, reserved_bytes, device)
            has_run = True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The error's frames hold what the step had made.
            error.__traceback__ = None
    # Behind the gradients that were made, and the frames of an error.
    clear_device_cache(garbage_collection=True)
    return Trial(has_run=has_run, peak_bytes=peak_bytes)


def _run(
    model: nn.Module,
    config: PyAOConfig,
    batch: Callable[[], dict[str, Any]],
    autocast: Callable[[], AbstractContextManager[Any]],
    num_runs: int,
    reserved_bytes: int,
    device: torch.device,
) -> int | None:
    """Run the step; return the most that was allocated."""
    is_accelerator = device.type != "cpu"
    reserved = None
    if is_accelerator:
        torch.accelerator.synchronize(device)
        torch.get_device_module(device).reset_peak_memory_stats(device)
        reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
    model.train()
    with quiet(), attach(model, config):
        for _ in range(num_runs):
            with autocast():
                outputs = model(**batch())
                loss = loss_of(outputs)
            del outputs
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    if not is_accelerator:
        return None
    torch.accelerator.synchronize(device)
    del reserved
    return int(torch.get_device_module(device).max_memory_allocated(device))


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def check_undoable(model: nn.Module) -> None:
    """Refuse a model of which a step cannot be undone.

    Raises:
        ConflictError: hooks run when a gradient is complete: an optimizer that steps in backward.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConflictError(
                f"{name!r} has a hook for when its gradient is complete, such as an optimizer's "
                "that steps in backward: a step cannot be tried without harm. Drop "
                "auto_micro_batch (--activation_offload_auto_micro_batch); `pyao microbatch` "
                "predicts without trying."
            )


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave gradients, buffers, modes and random numbers as they were."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = [
        (module, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    random_state = RandomState([] if device.type == "cpu" else [device])
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        random_state.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, tensor, value in buffers:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
                module._buffers[name] = tensor
        for module, is_training in modes:
            module.training = is_training
