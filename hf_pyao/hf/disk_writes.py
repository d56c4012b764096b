"""How much a Trainer's run would write to the disk, before it trains."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_pyao.auto.install.weights import streamed_by
from hf_pyao.auto.recording.model_copy import CopyError
from hf_pyao.config import GIB, PyAOConfig
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.stores.disk_figures import FEWER_BYTES, TB
from hf_pyao.engine.stores.host_share import host_limit_bytes
from hf_pyao.errors import ConfigError
from hf_pyao.hf.micro_batch.chooser import MicroBatchChooser, leaves_of
from hf_pyao.levers import LeversRefusedError
from hf_pyao.text import describe_error

logger = logging.getLogger(__name__)

KNOWN_BEFORE = ("all", "budget")
"""Policies of which it is known before training what leaves."""


def predicted_disk_bytes(trainer: Any, config: PyAOConfig) -> int | None:
    """Return the bytes that a micro-batch of *trainer* writes to the disk; None: not known.

    The step is recorded on a fake copy of the model with the longest of some samples. What finds
    room on the host, beside streamed weights, is not written.

    Args:
        trainer: about to train.
        config: what is offloaded.
    """
    if config.disk_path is None or config.disk_gib == 0:
        return None
    why = f"policy {config.policy!r} decides as it trains"
    if config.stream_weights == "auto":
        why = "stream_weights='auto' decides how much host memory weights take"
    elif config.policy in KNOWN_BEFORE:
        try:
            with RandomState([trainer.args.device]).kept():
                program = MicroBatchChooser(trainer, config).configured_step()
        except (ConfigError, CopyError, LeversRefusedError, torch.OutOfMemoryError) as error:
            why = describe_error(error)
        else:
            leaves = leaves_of(config, program)
            slots = zip(program.slots, leaves, strict=True)
            leaving_bytes = sum(slot.link_bytes for slot, leaves in slots if leaves)
            limit_bytes = host_limit_bytes(config.host_memory_gib)
            if config.stream_weights != "off":
                limit_bytes -= streamed_by(trainer.model, config).host_bytes
            beyond_bytes = max(0, leaving_bytes - max(0, int(limit_bytes)))
            disk_bytes = beyond_bytes if config.disk_gib is None else int(config.disk_gib * GIB)
            return min(beyond_bytes, disk_bytes)
    logger.info(
        "how much a step writes to the disk is not known before training (%s): writing ends at "
        "disk_write_limit=%g TB.",
        why,
        config.disk_write_limit,
    )
    return None


def check_disk_writes(
    nbytes: int, num_micro_batches: int, num_steps: int, config: PyAOConfig
) -> None:
    """Refuse a run that would write more to the disk than it may.

    Args:
        nbytes: what a micro-batch writes.
        num_micro_batches: of a step.
        num_steps: that are to come.
        config: has the limit.

    Raises:
        ConfigError: it would.
    """
    step_bytes = nbytes * num_micro_batches
    total_bytes = step_bytes * num_steps
    if total_bytes <= config.disk_write_limit * TB:
        logger.info(
            "%d steps will write about %.3g TB of saved tensors to the disk, of at most %g TB.",
            num_steps,
            total_bytes / TB,
            config.disk_write_limit,
        )
        return
    raise ConfigError(
        f"{num_steps:,} steps would write about {total_bytes / TB:.3g} TB of saved tensors to the "
        f"disk ({step_bytes / GIB:.3g} GiB a step), more than "
        f"{config.label('disk_write_limit')}={config.disk_write_limit:g} TB. {FEWER_BYTES}",
        key="disk-writes-too-much",
    )
