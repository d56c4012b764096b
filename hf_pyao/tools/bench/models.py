"""Builds the model that is measured, and its data."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hf_pyao.engine.stores import available_host_bytes
from hf_pyao.errors import ConfigError
from hf_pyao.tools.bench.memory import DeviceMemory
from hf_pyao.tools.bench.setup import BenchSetup
from hf_pyao.tools.estimate.model_specs import config_of

GIB = 2**30


def build_model(setup: BenchSetup, device: torch.device) -> Any:
    """Return the model with random weights, on *device*, in training mode.

    Raises:
        ConfigError: the architecture or a setting is unknown, the configuration cannot be read,
            the model has no positions for so long a sequence, or its weights do not fit.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(setup.model)
    config.use_cache = False  # keys and values of past tokens are of no use in training
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and setup.sequence_length > longest:
        raise ConfigError(
            f"the sequence length is {setup.sequence_length}, and {setup.model.name} has {longest} "
            "positions. Give a shorter one.",
            key="length-too-long",
        )
    options: dict[str, Any] = {"dtype": getattr(torch, setup.dtype)}
    if setup.attention is not None:
        options["attn_implementation"] = setup.attention
    _check_weights_fit(config, options, setup, device)
    torch.manual_seed(setup.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, **options)
    # Not .to(device): tables that a model computes when it is built must be on the device too.
    return model.to(device).train()


def make_batch(
    model: Any, setup: BenchSetup, micro_batch: int, device: torch.device
) -> dict[str, Any]:
    """Return random token ids, and the same as labels: int64, (micro_batch, sequence_length).

    Drawn on the CPU, so that every device gets the same.
    """
    generator = torch.Generator().manual_seed(setup.seed)
    shape = (micro_batch, setup.sequence_length)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def _check_weights_fit(
    config: Any, options: dict[str, Any], setup: BenchSetup, device: torch.device
) -> None:
    """Refuse a model whose weights alone are more than the memory there is.

    Raises:
        ConfigError: they are.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    except (RuntimeError, NotImplementedError):
        # Some models read values while they are built, or use operations that the meta device has
        # not: their size is not known beforehand, and building them tells whether they fit.
        return
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    free_bytes, place = free_memory(setup, device)
    if free_bytes is not None and weight_bytes > free_bytes:
        raise ConfigError(
            f"model {setup.model.name!r}: its weights in {setup.dtype} are "
            f"{weight_bytes / GIB:.1f} GiB, and {place} has {free_bytes / GIB:.1f} GiB free, which "
            "gradients and activations need too. Give smaller settings (what is left out keeps the "
            "architecture's default), or a shorter --dtype.",
            key="bench-model-too-large",
        )


def free_memory(setup: BenchSetup, device: torch.device) -> tuple[int | None, str]:
    """Return the bytes that a model could take on *device*, None if unknown; and their place."""
    if device.type == "cpu":
        return available_host_bytes(), "host memory"
    free_bytes = DeviceMemory(device).free_bytes()
    cap_bytes = None if setup.memory_cap_gib is None else int(setup.memory_cap_gib * GIB)
    known = [value for value in (free_bytes, cap_bytes) if value is not None]
    return min(known, default=None), str(device)
