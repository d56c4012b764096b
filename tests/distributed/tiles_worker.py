"""One of two ranks that train with MLPs in tiles: ``python -m tests.distributed.tiles_worker``.

Arguments: the folder for what was seen, how the model is sharded, and its architecture.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_pyao import PyAOConfig, attach
from tests.distributed.models import batch_of, build_model, layers_of
from tests.helpers.ranks import join_group, write_result

NUM_STEPS = 2
ZERO_STAGES = {"zero2": 2, "zero3": 3}


def wrap(kind: str, model: nn.Module, name: str) -> nn.Module:
    """Spread *model* over the ranks."""
    if kind in ZERO_STAGES:
        return with_zero(model, ZERO_STAGES[kind])
    layers = layers_of(model, name)
    if kind == "ddp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
            return DistributedDataParallel(model)
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({type(layer) for layer in layers})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    options: dict[str, Any] = {}
    if kind == "fsdp2_bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if kind == "fsdp2_linears":
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    fully_shard(module)
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def with_zero(model: nn.Module, stage: int) -> nn.Module:
    """Have DeepSpeed train *model*, as far as a CPU without a compiler can."""
    import deepspeed
    import deepspeed.ops

    # Collectives in shared memory, which training never calls, would be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    return engine  # type: ignore[no-any-return]


def backward(kind: str, wrapped: Any, loss: Tensor) -> dict[str, Tensor]:
    """Run backward; return the gradients, of this rank's parts where they are sharded."""
    if kind not in ZERO_STAGES:
        loss.backward()
        return {
            n: getattr(p.grad, "_local_tensor", p.grad).double()
            for n, p in wrapped.named_parameters()
            if p.grad is not None
        }
    from deepspeed.utils import safe_get_full_grad

    wrapped.backward(loss)
    found = {n: safe_get_full_grad(p) for n, p in wrapped.named_parameters()}
    wrapped.step()
    return {n: g.double().clone() for n, g in found.items() if g is not None}


def count_hooks(model: nn.Module) -> list[int]:
    """Count, for each parameter, how often autograd hands its gradient over."""
    counts: list[int] = []
    for index, parameter in enumerate(model.parameters()):
        counts.append(0)

        def count(_: Tensor, index: int = index) -> None:
            counts[index] += 1

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)
    return counts


def train(kind: str, name: str, config: PyAOConfig | None, *, before: bool) -> dict[str, Any]:
    """Train a few steps; return losses, gradients, and what ran in tiles."""
    model = build_model(name, "lora" if kind == "ddp" and name == "llama" else "full", "")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # masks are drawn tile by tile
    counts = count_hooks(model) if kind == "ddp" else []
    offloader = attach(model, config) if config is not None and before else None
    wrapped = wrap(kind, model, name)
    if config is not None and not before:
        offloader = attach(wrapped, config)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        if kind not in ZERO_STAGES:
            wrapped.zero_grad()
        loss = wrapped(**batch_of(dist.get_rank(), step)).loss
        found["gradients"].append(backward(kind, wrapped, loss))
        found["losses"].append(loss.item())
    found["counts"] = counts
    if offloader is not None and offloader.mlp_tiles is not None:
        found["metrics"] = offloader.mlp_tiles.metrics()
        found["described"] = offloader.mlp_tiles.describe()
        offloader.detach()
    return found


def compare(plain: dict[str, Any], tiled: dict[str, Any]) -> dict[str, Any]:
    """Say how far the gradients are apart, by norm, at most.

    Some are zero but for rounding, such as that of the keys' bias: a hundredth of the largest
    gradient is the least that they are compared with.
    """
    worst, worst_name = 0.0, ""
    same_names = True
    for own, ours in zip(plain.pop("gradients"), tiled.pop("gradients"), strict=True):
        same_names = same_names and own.keys() == ours.keys() and len(own) > 0
        least = 1e-2 * max(float(each.norm()) for each in own.values())
        for key in own:
            apart = float((own[key] - ours[key]).norm()) / max(float(own[key].norm()), least, 1e-30)
            if apart > worst:
                worst, worst_name = apart, key
    return {
        "worst": worst,
        "worst_name": worst_name,
        "same_names": same_names,
        "plain": plain,
        "tiled": tiled,
    }


def main(folder: Path, kind: str, name: str) -> None:
    """Train with and without, before and after wrapping, with segments too, and write what came of it."""
    join_group(folder)
    config = PyAOConfig(
        policy="all", min_bytes=0, keep_last_layers=0, host_memory_gib=0.1, mlp_tiles=3
    )
    plain = train(kind, name, None, before=False)
    found = {}
    for before in (False, True):
        tiled = train(kind, name, config, before=before)
        found["before" if before else "after"] = compare(dict(plain), tiled)
    in_segments = dataclasses.replace(
        config, checkpoint_every=2, checkpoint_nested=True, save_attention=True
    )
    tiled = train(kind, name, in_segments, before=False)
    found["in segments"] = compare(dict(plain), tiled)
    write_result(folder, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
