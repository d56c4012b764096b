"""Refuses, before training, what offloading cannot be combined with, and names the remedy.

Everything here raises :class:`~hf_pyao.errors.ConflictError`. An ``nn.DataParallel`` around the
model is refused where models are unwrapped (``../../model/map/wrappers.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pyao.engine.recompute.segment_lifecycle import OTHER_CHECKPOINTING
from hf_pyao.engine.weights.tables import StreamedTable
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import ConflictError
from hf_pyao.model.map.wrappers import unwrap_model

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

# transformers 5.23 renamed the first to the second and keeps the old name as an alias.
_CHECKPOINTING_FLAGS = ("gradient_checkpointing", "activation_checkpointing")

_UNIFIED_MEMORY = (
    "the device is MPS, whose memory is the host's memory: moving activations there frees nothing. "
    "Turn offloading off, or train on another device (use_cpu=True works for a trial)."
)


def check_training_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that offload activations too, or whose devices cannot be served.

    Asks *args* for its device, which sets that up if nothing has yet.

    Raises:
        ConflictError: another offloader is switched on, several GPUs would share one process, or
            the device has unified memory.
    """
    check_other_offloaders(args)
    if args.n_gpu > 1:
        raise ConflictError(
            f"{args.n_gpu} GPUs are visible to one process, which Trainer drives through "
            "nn.DataParallel; its replicas share one set of hooks across threads. Make one device "
            "visible (CUDA_VISIBLE_DEVICES=0), or start one process per device with "
            "`accelerate launch` or `torchrun`.",
            key="data-parallel",
        )
    if args.device.type == "mps":
        raise ConflictError(_UNIFIED_MEMORY, key="unified-memory")


def check_engine_of_streaming(args: object, label: str) -> None:
    """Refuse training arguments under which another engine has the weights; *label*: the setting.

    Raises:
        ConflictError: FSDP, DeepSpeed or ``torch_compile`` is on.
    """
    _refuse_engines(
        {
            "FSDP": getattr(args, "fsdp", None) or is_set("ACCELERATE_USE_FSDP"),
            "DeepSpeed": getattr(args, "deepspeed", None) or is_set("ACCELERATE_USE_DEEPSPEED"),
            "torch_compile": getattr(args, "torch_compile", False),
        },
        label,
    )


def check_accelerator_of_streaming(accelerator: Accelerator, label: str) -> None:
    """Refuse an accelerator under which another engine has the weights; *label*: the setting.

    Raises:
        ConflictError: FSDP or DeepSpeed is on, or models are compiled as they are prepared.
    """
    state: Any = accelerator.state
    dynamo = getattr(state, "dynamo_plugin", None)
    _refuse_engines(
        {
            "FSDP": getattr(state, "fsdp_plugin", None),
            "DeepSpeed": getattr(state, "deepspeed_plugin", None),
            "torch.compile": dynamo is not None and dynamo.backend.value != "NO",
        },
        label,
    )


def _refuse_engines(is_on: Mapping[str, object], label: str) -> None:
    for engine, value in is_on.items():
        if value:
            raise ConflictError(
                f"{label} is on together with {engine}, which holds the weights itself. Weights "
                "are streamed where each process has all of them on its host: use DDP or one "
                f"process, or give {label}='off'.",
                key="streaming-sharded",
            )


def is_set(variable: str) -> bool:
    """Say whether a variable of the environment is true."""
    return _is_true(os.environ.get(variable, ""))


def _is_true(value: object) -> bool:
    return str(value).lower() in ("1", "true", "yes")


def check_other_offloaders(args: object) -> None:
    """Refuse arguments that switch on another offloader of activations. Touches no device.

    Raises:
        ConflictError: TRL's ``activation_offloading``, or checkpointing's ``offload`` is on.
    """
    if getattr(args, "activation_offloading", False):
        raise ConflictError(
            "TRL's activation_offloading is on together with hf_pyao's offloading; only the inner "
            "one of two offloaders gets the tensors. Drop --activation_offloading (on a config "
            "class without PyAOArguments, argparse takes --activation_offload for an abbreviation "
            "of it: mix PyAOArguments into that class).",
            key="other-offloader",
        )
    for flag in _CHECKPOINTING_FLAGS:
        kwargs = getattr(args, f"{flag}_kwargs", None)
        if isinstance(kwargs, dict) and kwargs.get("offload"):
            raise ConflictError(
                f"{flag}_kwargs has offload={kwargs['offload']!r}: transformers would then copy "
                "the layer inputs to the host itself, and wait for each copy. Drop that key; "
                "hf_pyao offloads them when checkpointing is on.",
                key="other-offloader",
            )


def uses_checkpointing(args: object) -> bool:
    """Say whether training arguments switch checkpointing on, under either of its names."""
    return any(getattr(args, flag, None) for flag in _CHECKPOINTING_FLAGS)


def fsdp_checkpoints(args: object) -> bool:
    """Say whether FSDP's own checkpointing is asked for, by ``fsdp_config`` or by Accelerate."""
    given = getattr(args, "fsdp_config", None)
    values = given if isinstance(given, dict) else {}
    keys = ("activation_checkpointing", "fsdp_activation_checkpointing")
    return any(_is_true(values.get(key)) for key in keys) or is_set("FSDP_ACTIVATION_CHECKPOINTING")


def check_other_checkpointing(model: nn.Module, length: int) -> None:
    """Refuse a model whose layers are checkpointed, where ``checkpoint_every`` is *length*.

    Raises:
        ConflictError: they are.
    """
    what = other_checkpointing(model)
    if what:
        raise ConflictError(
            OTHER_CHECKPOINTING.format(what=what, length=length), key="other-checkpointing"
        )


def other_checkpointing(model: nn.Module) -> str:
    """Say what runs layers of *model* again in backward; empty if nothing does."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing is on in the model"
        if type(module).__name__ == "CheckpointWrapper":
            return f"{name!r} is wrapped in torch's CheckpointWrapper"
    return ""


def check_checkpointing_arguments(args: object, length: int) -> None:
    """Refuse training arguments that switch checkpointing on too, as the function above.

    Raises:
        ConflictError: they do.
    """
    if length and (uses_checkpointing(args) or fsdp_checkpoints(args)):
        what = "the training arguments switch gradient checkpointing on"
        raise ConflictError(
            OTHER_CHECKPOINTING.format(what=what, length=length), key="other-checkpointing"
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model, or surroundings, in which offloading would have no effect or a wrong one.

    Raises:
        ConflictError: saved-tensor hooks are already set around the caller, backward is to be
            compiled, a layer is wrapped in another offloader, or the model sits in unified memory.
    """
    # True: see hooks also while a compiler traces. Only the innermost hooks are called: ours would
    # win inside the layers, and the ones already set would silently miss those tensors.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise ConflictError(
            "saved-tensor hooks are already set here (torch.autograd.graph.saved_tensors_hooks or "
            "save_on_cpu). Only the innermost hooks of a nest see a tensor, so these two cannot "
            "work together. Attach and train outside that context.",
            key="other-offloader",
        )
    dynamo = sys.modules.get("torch._dynamo.config")  # not imported: nothing was compiled
    if getattr(dynamo, "compiled_autograd", False):
        raise ConflictError(
            "torch._dynamo.config.compiled_autograd is on: backward would be compiled, with the "
            "hooks that bring saved tensors back traced into it. Switch it off; torch.compile of "
            "the model or of its layers works with offloading.",
            key="compiled-autograd",
        )
    if any(parameter.device.type == "mps" for parameter in model.parameters()):
        raise ConflictError(_UNIFIED_MEMORY, key="unified-memory")
    check_modules(model)


def check_modules(model: nn.Module) -> None:
    """Refuse what :func:`check_model` does, as far as *model* itself tells.

    Raises:
        ConflictError: a layer is wrapped in another offloader, weights are trained by zeroth order,
            noise is written after it was saved, or the model is in an ``nn.DataParallel``.
    """
    unwrap_model(model)
    for name, module in model.named_modules():
        table = module._parameters
        if isinstance(table, StreamedTable) and isinstance(table.source, WeightVisits):
            raise ConflictError(
                f"{name or type(module).__name__!r} is trained by zeroth order, which saves no "
                "activations that could be offloaded. Close the ZerothOrder first.",
                key="zeroth-order-attached",
            )
        if isinstance(module, nn.RReLU) and module.training:
            raise ConflictError(
                f"{name!r} is an nn.RReLU, whose noise is written after autograd has saved it: a "
                "copy made at that moment would be wrong. Use another activation, or freeze its "
                "randomness with eval().",
                key="noise-after-save",
            )
        if _offloads_checkpoints(module):
            raise ConflictError(
                f"{name or type(module).__name__!r} already offloads what checkpointing saves "
                "(checkpointing was enabled with offload=True). Enable it without `offload`; "
                "hf_pyao offloads the layer inputs itself.",
                key="other-offloader",
            )


def _offloads_checkpoints(module: nn.Module) -> bool:
    """Recognise the two ways to offload a checkpoint's input: by wrapper, and by function."""
    if type(module).__name__ == "OffloadWrapper":  # torch's, which accelerate applies under FSDP2
        return True
    # transformers puts a function local to the method that enables checkpointing in the place of
    # torch's own; nothing else tells that `offload` was asked for.
    function = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
    return getattr(function, "__qualname__", "").endswith("<locals>.checkpoint_func")
