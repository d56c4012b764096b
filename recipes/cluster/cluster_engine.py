"""The engines of a local cluster: their settings on a CPU, and the proof that they are at work."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.cluster_settings import OFFLOAD_OPTIONS, RECIPE_OPTIONS, NodeSettings, PointPlan
from hf_pyao.errors import ConfigError
from recipe_arguments import Arguments, parse_arguments

DEEPSPEED_FILE = Path(__file__).parents[1] / "configs" / "zero2_bf16.json"
"""What five real nodes run with."""

_STAGES = {"zero1": 1, "zero2": 2}


def forbid_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives, which training never calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def limit_waiting(timeout_s: float) -> None:
    """Give every group of processes a limit for its collectives.

    ``--ddp_timeout`` is for the first group alone; DeepSpeed makes more, with torch's half an hour.
    """
    from torch.distributed import distributed_c10d

    # Where torch looks up its default; a release without the name has that half an hour.
    if hasattr(distributed_c10d, "default_pg_timeout"):
        distributed_c10d.default_pg_timeout = timedelta(seconds=timeout_s)


def deepspeed_config(engine: str, precision: str) -> dict[str, Any]:
    """Return the real nodes' DeepSpeed settings, as far as a CPU without a compiler can have them.

    Adam is torch's, on the CPU all the same; there is no device memory to pin for or to overlap
    with.
    """
    config: dict[str, Any] = json.loads(DEEPSPEED_FILE.read_text(encoding="utf-8"))
    config["bf16"]["enabled"] = precision == "bf16"
    config["zero_force_ds_cpu_optimizer"] = False
    config["optimizer"]["params"]["torch_adam"] = True
    zero = config["zero_optimization"]
    zero["stage"] = _STAGES[engine]
    zero["overlap_comm"] = zero["offload_optimizer"]["pin_memory"] = False
    return config


def time_collectives(
    settings: NodeSettings, point: PointPlan, num_parameters: int, repeats: int
) -> list[float]:
    """Return the seconds that the collectives of one optimizer step take, and nothing else.

    With the links unshaped a step has these seconds in it, which are not compute: all nodes' bytes
    and messages pass through the cores of one machine.
    """
    is_half = settings.precision == "bf16" and settings.engine in _STAGES
    share = torch.zeros(
        -(-num_parameters // settings.nodes), dtype=torch.bfloat16 if is_half else torch.float32
    )
    gradient = share.repeat(settings.nodes)
    num_reduces = point.gradient_accumulation if settings.engine == "zero2" else 1
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(num_reduces):
            dist.all_reduce(gradient)
        if settings.engine in _STAGES:
            dist.all_gather_into_tensor(gradient, share)
        seconds.append(time.perf_counter() - start_s)
    return seconds[1:]


def build_arguments(settings: NodeSettings, point: PointPlan, *, saves: bool) -> Arguments:
    """Return the training recipe's arguments for one point.

    Args:
        settings: of the node.
        point: what to train.
        saves: whether checkpoints are written where the settings ask for them.

    Raises:
        ConfigError: an option for the recipe is unknown or bad.
    """
    folder = Path(settings.output_dir or settings.work_dir, point.name)
    options = [*RECIPE_OPTIONS, "--model_size", settings.model_size, "--output_dir", str(folder)]
    if settings.activation_offload:
        options += OFFLOAD_OPTIONS
    else:
        options += ["--no_activation_offload"]
    if settings.precision == "bf16":
        options += ["--bf16"]
    if saves and settings.output_dir is not None and settings.save_steps:
        options += ["--save_strategy", "steps", "--save_steps", str(settings.save_steps)]
    else:
        options += ["--save_strategy", "no"]
    if settings.engine in _STAGES:
        path = Path(settings.work_dir, f"deepspeed_{os.environ.get('RANK', '0')}.json")
        config = deepspeed_config(settings.engine, settings.precision)
        path.write_text(json.dumps(config), encoding="utf-8")
        options += ["--deepspeed", str(path)]
    options += [
        *("--max_steps", str(point.steps)),
        *("--per_device_train_batch_size", str(point.micro_batch)),
        *("--gradient_accumulation_steps", str(point.gradient_accumulation)),
        *("--ddp_timeout", str(int(settings.timeout_s))),
    ]
    return parse_arguments(point.architecture, [*options, *settings.options])


def check_engine(settings: NodeSettings, point: PointPlan, trainer: Any) -> None:
    """Refuse to train with anything but the engine asked for, on all nodes.

    Launchers fall back quietly: to one process, or to ranks that train each for itself.

    Raises:
        ConfigError: says what is at work instead.
    """
    engine = trainer.model_wrapped
    found: dict[str, Any] = {
        "processes": trainer.accelerator.num_processes,
        "distributed type": trainer.accelerator.distributed_type.value,
        "engine": type(engine).__name__,
        "micro-batch": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
    }
    expected = {
        "processes": settings.nodes,
        "distributed type": "MULTI_CPU",
        "engine": "DistributedDataParallel",
        "micro-batch": point.micro_batch,
        "accumulation": point.gradient_accumulation,
    }
    if settings.engine in _STAGES:
        expected |= {"distributed type": "DEEPSPEED", "engine": "DeepSpeedEngine"}
        expected["stage"] = _STAGES[settings.engine]
        if isinstance(engine, _deepspeed_engine()):
            found["stage"] = engine.zero_optimization_stage()
            found["micro-batch"] = engine.train_micro_batch_size_per_gpu()
            found["accumulation"] = engine.gradient_accumulation_steps()
    if found != expected:
        raise ConfigError(
            f"the nodes would not train as asked: found {found}; expected {expected}. Options "
            "behind -- must not change what options of ../local_cluster.py decide."
        )


def _deepspeed_engine() -> Any:
    from deepspeed import DeepSpeedEngine

    return DeepSpeedEngine
