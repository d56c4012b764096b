"""Settings of other libraries that do nothing beside hf_pyao's, or in this process.

Training arguments are asked for by attribute: no library is imported.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_pyao.auto.install.conflicts import fsdp_checkpoints, is_set
from hf_pyao.config import PyAOConfig
from hf_pyao.errors import warn
from hf_pyao.no_effect import NoEffect

logger = logging.getLogger(__name__)


def warn_of_sequence_parallel(settings: object) -> None:
    """Say that hf_pyao was not tried beside ring attention, where it is on.

    Args:
        settings: training arguments, or Accelerate's state.
    """
    size = getattr(getattr(settings, "parallelism_config", None), "cp_size", None) or 1
    if size > 1:
        warn(
            logger,
            "sequence-parallel-untried",
            "cp_size=%d divides sequences among processes (ring attention). hf_pyao offloads what "
            "each process saves; that was not tried with it. Compare the loss of the first steps "
            "with that of a run without hf_pyao, or take sp_size (Ulysses), which was tried.",
            size,
        )


def look_at_arguments(args: object, config: PyAOConfig) -> Iterator[NoEffect]:
    """Yield what training arguments, and Accelerate's environment, switch on in vain."""
    is_fsdp = bool(getattr(args, "fsdp", None)) or is_set("ACCELERATE_USE_FSDP")
    kind = _kind_of(getattr(args, "distributed_state", None))
    yield from _liger(args, config)
    yield from _fsdp_checkpointing(fsdp_checkpoints(args), is_fsdp and kind in ("FSDP", ""), kind)
    yield from look_at_deepspeed(getattr(args, "deepspeed", None))


def look_at_accelerator(state: object) -> Iterator[NoEffect]:
    """Yield what Accelerate was told to do in vain; *state*: ``accelerator.state``."""
    kind = _kind_of(state)
    asked = getattr(getattr(state, "fsdp_plugin", None), "activation_checkpointing", False)
    asked = bool(asked) or is_set("FSDP_ACTIVATION_CHECKPOINTING")
    yield from _fsdp_checkpointing(asked, kind == "FSDP", kind)
    plugin = getattr(state, "deepspeed_plugin", None)
    yield from look_at_deepspeed(getattr(plugin, "deepspeed_config", None))


def look_at_deepspeed(given: object) -> Iterator[NoEffect]:
    """Yield what DeepSpeed's configuration, a dictionary or a file, switches on in vain."""
    block = _read(given).get("activation_checkpointing")
    if block:
        yield NoEffect(
            setting="activation_checkpointing in DeepSpeed's configuration",
            expected="layers run again in backward, as that block says",
            seen="the block alone changes no layer of a transformers model",
            reason="it configures deepspeed.checkpointing.checkpoint, which transformers' models "
            "do not call",
            remedy="drop the block, and set checkpoint_every of hf_pyao or "
            "activation_checkpointing=True (before transformers 5.23: gradient_checkpointing=True)",
        )


def _liger(args: object, config: PyAOConfig) -> Iterator[NoEffect]:
    mode = config.effective().head_loss
    if getattr(args, "use_liger_kernel", False) and mode != "off":
        yield NoEffect(
            setting=f"{config.label('head_loss')}={mode!r}",
            expected="hf_pyao computes the loss without ever holding all logits",
            seen="use_liger_kernel is on too",
            reason="Liger puts a forward of its own in the place of the model's, which computes "
            "the loss from the hidden states and does not call the head",
            remedy="drop one of the two",
        )


def _fsdp_checkpointing(is_asked: bool, is_fsdp: bool, kind: str) -> Iterator[NoEffect]:
    if is_asked and not is_fsdp:
        yield NoEffect(
            setting="fsdp_activation_checkpointing",
            expected="FSDP wraps each layer in a checkpoint, which runs it again in backward",
            seen=f"this process does not run under FSDP (distributed type {kind or 'not known'})",
            reason="Accelerate applies the setting to FSDP's units alone, and ignores FSDP's "
            "plugin on a CPU",
            remedy="start the run under FSDP, or set checkpoint_every of hf_pyao or "
            "activation_checkpointing=True (before transformers 5.23: gradient_checkpointing=True)",
        )


def _kind_of(state: object) -> str:
    """Return Accelerate's distributed type, such as ``"NO"``; empty if it is not known."""
    found: Any = getattr(state, "distributed_type", None)
    return str(getattr(found, "value", found or ""))


def _read(given: object) -> Mapping[str, Any]:
    """Return DeepSpeed's configuration; empty if it cannot be read, which DeepSpeed itself says."""
    if isinstance(given, str | os.PathLike) and os.path.isfile(given):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    return given if isinstance(given, Mapping) else {}
