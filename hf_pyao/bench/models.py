"""Builds the model that is measured, and its data."""

from __future__ import annotations

from typing import Any

import torch

from hf_pyao.bench.setup import BenchSetup, ModelSpec
from hf_pyao.errors import ConfigError


def build_model(setup: BenchSetup, device: torch.device) -> Any:
    """Return the model with random weights, on *device*, in training mode.

    Raises:
        ConfigError: the architecture is unknown or its configuration cannot be read, or the model
            has no positions for so long a sequence.
    """
    from transformers import AutoModelForCausalLM

    config = _config(setup.model)
    config.use_cache = False  # keys and values of past tokens are of no use in training
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and setup.sequence_length > longest:
        raise ConfigError(
            f"the sequence length is {setup.sequence_length}, and {setup.model.name} has {longest} "
            "positions. Give a shorter one."
        )
    options: dict[str, Any] = {"dtype": getattr(torch, setup.dtype)}
    if setup.attention is not None:
        options["attn_implementation"] = setup.attention
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


def _config(spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    try:
        if spec.path is not None:
            return AutoConfig.from_pretrained(spec.path)
        return AutoConfig.for_model(spec.model_type or "", **spec.settings)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model {spec.name!r}: {reason} Give an architecture of transformers with its "
            "settings (llama:hidden_size=64,...), or a folder with a config.json."
        ) from error
