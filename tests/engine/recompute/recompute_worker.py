"""One rank: trains under DDP and FSDP2 with and without recomputation, and compares bits.

Called as ``python -m tests.engine.recompute.recompute_worker FOLDER`` with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_pyao import PyAOConfig, attach
from tests.helpers import EVERY_LAYER, autocasting, tiny_batch, tiny_model
from tests.helpers.ranks import ends_at_once, join_group, write_result
from tests.helpers.recompute_sets import ALONE

WRAPPERS = ("ddp", "fsdp2", "fsdp2 bf16")
MODELS = ("opt", "gpt2", "llama")
SETS = (("pointwise",), ("*",), ("mlp_up", "mlp_act", "mlp_norm"))
NAMED_SETS = {
    "opt": (("core_attn",), (".",)),
    "gpt2": (("mlp_act",), ("mlp_act", "mlp_down"), ("*dropout",)),
    "llama": (("attn_norm", "mlp_norm"), ("mlp",)),
}
"""One of them after the other, alone under one wrapper and beside offloading under the next."""
COLLECTIVES = ("", "async", "functional")
AUTOCASTS = (None, torch.bfloat16)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """Wrap *model* and each of its layers."""
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    dtype = torch.bfloat16 if wrapper == "fsdp2 bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    base = model.base_model
    layers = getattr(base, "h", None) or getattr(base, "layers", None) or base.decoder.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def two_steps(
    origin: nn.Module, wrapper: str, autocast: torch.dtype | None, config: PyAOConfig | None
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Train two steps of two micro-batches; return losses, local gradients, the random state."""
    model = wrapped(copy.deepcopy(origin), wrapper)
    offloader = attach(model, config) if config else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    seen: list[torch.Tensor] = []
    for step in range(2):
        for index in range(2):
            batch = tiny_batch(10 * dist.get_rank() + 2 * step + index)
            with autocasting(autocast):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            seen.append(loss.detach())
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                seen.append(local.clone())
        optimizer.step()
        optimizer.zero_grad()
    metrics = offloader.totals() if offloader else {}
    if offloader is not None:
        offloader.detach()
    return [*seen, torch.get_rng_state()], metrics


def compared(
    found: list[Tensor], expected: list[Tensor], metrics: dict[str, float]
) -> dict[str, Any]:
    """Return what differs, and what was done."""
    pairs = zip(found, expected, strict=True)
    return {
        "different": [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)],
        "num_tensors": len(expected),
        "recomputed_bytes": metrics["recomputed_bytes"],
    }


class _Summing(LlamaMLP):
    """An MLP that scales by a mean over all ranks."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        mean = y.detach().abs().mean().reshape(1)
        if self.how == "functional":
            mean = functional_collectives.all_reduce(mean, "sum", dist.group.WORLD)
        else:
            work = dist.all_reduce(mean, async_op=self.how == "async")
            if work is not None:
                work.wait()
        return y * (1 + mean / (1 + mean))


def summing(how: str) -> nn.Module:
    """Return a model whose MLPs run a collective; *how*: ``""``, ``"async"``, ``"functional"``."""
    model = tiny_model("llama")
    for module in model.modules():
        if isinstance(module, LlamaMLP):
            module.__class__ = _Summing
            module.how = how
    return model


def main(folder: Path) -> None:
    """Compare every wrapper and model; write what differs."""
    join_group(folder, timeout_s=60)
    results: dict[str, Any] = {}
    for how in COLLECTIVES:
        origin = summing(how)
        expected, _ = two_steps(origin, "ddp", None, None)
        found, metrics = two_steps(origin, "ddp", None, replace(ALONE, recompute_modules=("*",)))
        results[f"collective, {how}"] = compared(found, expected, metrics)
    for index, (wrapper, model_type) in enumerate(itertools.product(WRAPPERS, MODELS)):
        names, autocast = SETS[(index + index // 3) % 3], AUTOCASTS[index % 2]
        origin = tiny_model(model_type, dropout=0.1)
        expected, _ = two_steps(origin, wrapper, autocast, None)
        cases = [(names, ALONE), (names, EVERY_LAYER)]
        for number, named in enumerate(NAMED_SETS[model_type]):
            cases.append((named, (ALONE, EVERY_LAYER)[(index // len(MODELS) + number) % 2]))
        for selected, base in cases:
            config = replace(base, recompute_modules=selected)
            found, metrics = two_steps(origin, wrapper, autocast, config)
            key = f"{wrapper}, {model_type}, {selected}, {autocast}, {base.policy}"
            results[key] = compared(found, expected, metrics)
    write_result(folder, results)
    dist.barrier()


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]))
