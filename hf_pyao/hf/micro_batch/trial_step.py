"""A step that is tried: it may run out of memory, and leaves nothing behind either way.

Parameters are only read, gradients are laid aside, and the state of modules, random numbers and the
allocator's unused memory are as before. No optimizer takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from hf_pyao.attachment import attach
from hf_pyao.auto.recording.model_copy import loss_of
from hf_pyao.config import PyAOConfig
from hf_pyao.engine.rerun.micro_batch_state import MicroBatchState, has_hooks
from hf_pyao.engine.rerun.module_state import ModuleState, StateOfCall
from hf_pyao.errors import ConflictError
from hf_pyao.model.fake_cuda.quiet import quiet


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a step that was tried."""

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
    with undisturbed(model):
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
        ConflictError: hooks run in backward, which may step an optimizer; or modules hold what
            cannot be put back.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise _cannot_try(f"{name!r} has a hook on its gradient")
    for name, module in model.named_modules():
        if has_hooks(module):
            raise _cannot_try(f"module {name!r} has a hook that runs in backward")
    if unknown := StateOfCall(ModuleState([model], "the model")).reason_unknown():
        raise _cannot_try(unknown)


def _cannot_try(reason: str) -> ConflictError:
    return ConflictError(
        f"{reason}: a step cannot be tried without harm, since an optimizer may step in backward, "
        "or a state may be lost. Drop auto_micro_batch (--activation_offload_auto_micro_batch); "
        "`pyao estimate --find` predicts without trying.",
        key="micro-batch-trial",
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave gradients, the state of modules and random numbers as they were.

    Raises:
        ConflictError: at the end: something was changed that cannot be put back.
    """
    state = MicroBatchState(ModuleState([model], "the model"))
    with state.without_gradients():
        try:
            yield
        finally:
            reason = state.reason_not_undone(after_backward=True, in_backward=False)
            state.undo()
    if reason:
        raise _cannot_try(reason)
