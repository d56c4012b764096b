"""Small models that run on a CPU: what a real step holds and moves, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from experiments.experiment import Options, progress
from experiments.published import NUM_NODES
from experiments.rows import Result, Row
from experiments.systems import ACCUMULATION, GIVEN, System
from hf_pyao import PyAOConfig, attach
from hf_pyao.tools.estimate.fake_step import build_model
from hf_pyao.tools.estimate.model_sizes import build_config, find_size

MINIATURE_SIZE, MINIATURE_VOCABULARY, MINIATURE_LENGTH = "tiny", 512, 64
MICRO_BATCHES = (1, 2, 4, 8)
COUNTED = (
    "small models in float32 on a CPU: bytes are exact, and no device memory is measured",
    "policy 'all' in the place of 'pyao': the rule has no device to time",
)
NOTHING = {"policy": "budget", "budget": 0}
"""Settings with which nothing leaves, and all is counted."""


def count_step(
    architecture: str,
    settings: dict[str, Any],
    micro_batch: int,
    size: str,
    *,
    checkpointing: bool = False,
) -> dict[str, float]:
    """Run one real step on the CPU with hf_pyao's *settings*.

    Returns:
        The engine's counters of bytes, and its times.
    """
    model = _small_model(architecture, size, checkpointing=checkpointing)
    ids = torch.randint(0, MINIATURE_VOCABULARY, (micro_batch, MINIATURE_LENGTH))
    with attach(model, PyAOConfig(**settings, min_bytes=0)) as offloader:
        model(input_ids=ids, labels=ids).loss.backward()
        return offloader.metrics()


def _small_model(architecture: str, size: str, *, checkpointing: bool = False) -> Any:
    shape = find_size(architecture, size)
    config = build_config(architecture, shape, vocab_size=MINIATURE_VOCABULARY)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    config.use_cache = False
    torch.manual_seed(0)
    return build_model(config, checkpointing=checkpointing, dtype="float32")


def _settings(system: System) -> dict[str, Any]:
    """Return its settings. PyAO's rule has no device to time here: all leaves that can."""
    if system.is_pyao:
        return {**system.settings, "policy": "all"}
    return NOTHING if system.head_loss == "off" else {**NOTHING, "head_loss": system.head_loss}


def _counted(options: Options) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """Yield each model, what its rows have in common, and what was counted of a step."""
    size = size_of(options)
    for model in options.models:
        for system in progress(GIVEN, model):
            if system is ACCUMULATION:  # its gradients differ; what is counted does not
                continue
            for micro_batch in MICRO_BATCHES[:2] if options.is_smoke else MICRO_BATCHES:
                common = {
                    "model": f"{model}:{size}",
                    "system": system.name,
                    "micro_batch": micro_batch,
                    "unit": "MB",
                }
                again = system.checkpointing
                yield (
                    model,
                    common,
                    count_step(model, _settings(system), micro_batch, size, checkpointing=again),
                )


def size_of(options: Options) -> str:
    """Return the size of the models that run."""
    return "micro" if options.is_smoke else MINIATURE_SIZE


def count_held(options: Options) -> Result:
    """Count what autograd holds after forward, for each model, system and micro-batch."""
    rows = [
        Row(
            **common,
            quantity="held after forward",
            value=counted["held_bytes"] / 1e6,
            detail={
                "offloaded_mb": counted["offloaded_bytes"] / 1e6,
                "host_mb": counted["host_peak_bytes"] / 1e6,
                "link_mb": counted["link_bytes"] / 1e6,
            },
        )
        for _, common, counted in _counted(options)
    ]
    return Result(rows=rows, assumptions=COUNTED)


def count_host(options: Options) -> Result:
    """Count what a node's host holds for a step, by component."""
    optimizer = {model: _optimizer_bytes(model, size_of(options)) for model in options.models}
    rows = []
    for model, common, counted in _counted(options):
        weights, states = optimizer[model]
        parts = {
            "float32 weights": weights / 1e6,
            "optimizer states": states / 1e6,
            "activations": counted["host_peak_bytes"] / 1e6,
        }
        value = sum(parts.values())
        rows.append(Row(**common, quantity="peak host memory", value=value, detail=parts))
    return Result(
        rows=rows,
        assumptions=[
            *COUNTED,
            "float32 weights and AdamW's states: of a fifth of the parameters, after a real step "
            "of torch's AdamW; activations: the host pool's peak; the process and its libraries "
            "are not counted",
        ],
    )


def _optimizer_bytes(architecture: str, size: str) -> tuple[int, int]:
    """Return bytes of one node's share of the weights, and of what torch's AdamW holds for it."""
    parameters = [p.detach().flatten() for p in _small_model(architecture, size).parameters()]
    flat = torch.cat(parameters)
    share = flat[: -(-flat.numel() // NUM_NODES)].float().clone().requires_grad_()
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share])
    optimizer.step()
    states = [value for value in optimizer.state[share].values() if torch.is_tensor(value)]
    return share.nbytes, sum(value.nbytes for value in states)
