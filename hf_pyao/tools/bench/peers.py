"""What others offer: checkpointing, torch's own hooks, TRL, DeepSpeed.

Each is used as its documentation says, with its defaults, through its public entry.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_pyao.engine.torch_hooks.checkpoint_arguments import hooks_argument
from hf_pyao.tools.packages import import_failure

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_pyao.engine.runtime.engine import OffloadEngine


class MethodUnavailable(Exception):
    """A method cannot run here; the message says why."""


def _no_metrics() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Installed:
    """A method on a model."""

    step: Callable[[], AbstractContextManager[Any]]
    """Makes the context in which one forward and its backward run."""
    metrics: Callable[[], dict[str, float]] = _no_metrics
    """Returns the method's own counters for the last step."""
    engine: OffloadEngine | None = None
    """hf_pyao's, where that is the method."""
    run: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """Runs forward and backward of a batch and returns the loss, where a method does not leave
    that to autograd. Gradients are then in ``.grad``."""


@contextmanager
def nothing(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Leave the model alone: the reference."""
    yield Installed(step=nullcontext)


@contextmanager
def checkpoint(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Recompute each layer in backward, from its input."""
    with checkpointing(model):
        yield Installed(step=nullcontext)


@contextmanager
def checkpoint_offload(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Recompute each layer, with its input held in host memory meanwhile."""
    # Newer releases pass the argument on from another method, hence not gradient_... alone.
    methods = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in methods if hasattr(model, name))
    if "offload" not in inspect.signature(enable).parameters:
        import transformers

        raise MethodUnavailable(
            f"transformers {transformers.__version__} has no `offload` for checkpointing; 5.17 has"
        )
    need_accelerator(device, "transformers holds the inputs in pinned memory")
    with checkpointing(model, offload=True):
        yield Installed(step=nullcontext)


@contextmanager
def save_on_cpu(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Copy every saved tensor to the host and back, on the compute stream.

    On a CPU torch's own context copies nothing, since a tensor is on the host already. There the
    copies are made into memory that torch's allocator does not count, which stands for the host.
    """
    from torch.autograd import graph

    if device.type == "cpu":
        yield Installed(step=lambda: graph.saved_tensors_hooks(_to_host, _from_host))
        return
    yield Installed(step=lambda: graph.save_on_cpu(pin_memory=True, device_type=device.type))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    import numpy
    import torch

    memory = numpy.empty(max(1, tensor.numel() * tensor.element_size()), numpy.uint8)
    copy = torch.from_numpy(memory)[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return copy.view(tensor.shape).copy_(tensor.detach())


def _from_host(copy: torch.Tensor) -> torch.Tensor:
    return copy.clone()


def trl_streams(model: nn.Module, device: torch.device) -> AbstractContextManager[Installed]:
    """Install TRL's ``OffloadActivations`` with a stream beside compute."""
    return _trl(model, device, use_streams=True)


def trl_no_streams(model: nn.Module, device: torch.device) -> AbstractContextManager[Installed]:
    """Install TRL's ``OffloadActivations`` on the compute stream."""
    return _trl(model, device, use_streams=False)


@contextmanager
def _trl(model: nn.Module, device: torch.device, *, use_streams: bool) -> Iterator[Installed]:
    need_package("trl", "TRL")
    need_accelerator(device, "TRL's offloading uses its streams")
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    before = _forward_hooks(model)
    context = get_act_offloading_ctx_manager(model, use_streams=use_streams)
    try:
        # As SFTTrainer does: one context object, entered around each forward and backward.
        yield Installed(step=lambda: context)
    finally:
        _remove_new_hooks(model, before)


@contextmanager
def deepspeed(model: nn.Module, device: torch.device) -> Iterator[Installed]:
    """Recompute each layer; DeepSpeed offloads the inputs on a stream of its own."""
    need_package("deepspeed", "DeepSpeed")
    need_accelerator(device, "DeepSpeed offloads nothing on a CPU")
    try:
        from deepspeed.runtime.activation_checkpointing.offload_activations import (
            CheckpointHiddenStatesOffload,
        )
    except ImportError as error:
        raise MethodUnavailable(
            f"this DeepSpeed has no CheckpointHiddenStatesOffload, or does not load: {error}"
        ) from error
    context = CheckpointHiddenStatesOffload()
    done: dict[str, float] = {}

    @contextmanager
    def step() -> Iterator[None]:
        with context:
            yield
            # Its counters are wiped when the context is entered again. Zeros show a silent no-op.
            stats = context.stats
            done["offloaded_bytes"] = stats.offloaded_bytes
            done["reloaded_bytes"] = stats.restored_bytes

    with checkpointing(model):
        yield Installed(step=step, metrics=lambda: dict(done))


@contextmanager
def checkpointing(
    model: Any, *, use_reentrant: bool = False, context_fn: Any = None, **options: Any
) -> Iterator[None]:
    """Switch transformers' checkpointing on and off again at the end.

    Args:
        model: a model of transformers.
        use_reentrant: torch's older form of it.
        context_fn: what ``torch.utils.checkpoint.checkpoint`` takes by that name.
        options: further ones of ``gradient_checkpointing_enable``.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    had_hook = getattr(model, "_require_grads_hook", None)
    with warnings.catch_warnings():
        # The method was renamed in transformers 5.23; the old name is in every release.
        warnings.simplefilter("ignore", FutureWarning)
        arguments: dict[str, Any] = {"use_reentrant": use_reentrant}
        if context_fn is not None:
            arguments["context_fn"] = context_fn
        arguments |= hooks_argument(torch_checkpoint, arguments)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **options)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()
        if had_hook is None and getattr(model, "_require_grads_hook", None) is not None:
            # Switched on with checkpointing, and left on when that is switched off.
            model.disable_input_require_grads()


def need_package(name: str, title: str) -> None:
    """Refuse a method whose package is missing or broken.

    Raises:
        MethodUnavailable: it is; the message says which.
    """
    if importlib.util.find_spec(name) is None:
        raise MethodUnavailable(f"{title} is not installed")
    failure = import_failure(name)
    if failure is not None:
        raise MethodUnavailable(f"{title}: {failure}")


def need_accelerator(device: torch.device, why: str) -> None:
    """Refuse a method that a CPU cannot run.

    Raises:
        MethodUnavailable: *device* is a CPU; the message says *why* that does not do.
    """
    if device.type == "cpu":
        raise MethodUnavailable(f"needs an accelerator: {why}")


def _forward_hooks(model: nn.Module) -> dict[tuple[nn.Module, str], set[int]]:
    return {
        (module, table): set(getattr(module, table))
        for module in model.modules()
        for table in ("_forward_pre_hooks", "_forward_hooks")
    }


def _remove_new_hooks(model: nn.Module, before: dict[tuple[nn.Module, str], set[int]]) -> None:
    """Remove hooks that were not there before: TRL returns no handles of its own."""
    for (module, table), known in before.items():
        hooks = getattr(module, table)
        for key in [key for key in hooks if key not in known]:
            del hooks[key]
            for other in ("_with_kwargs", "_always_called"):
                getattr(module, table + other, {}).pop(key, None)
