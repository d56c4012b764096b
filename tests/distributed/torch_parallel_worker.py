"""One of two ranks of torch's pipelines, or of its tensor parallelism.

Called as ``python -m tests.distributed.torch_parallel_worker FOLDER CASE``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hf_pyao import Offloader, attach
from hf_pyao.training_engines import DTENSOR, local_part
from tests.helpers import EVERY_LAYER, Stack, linear_relu, tiny_batch, tiny_model
from tests.helpers.ranks import ends_at_once, join_group, write_result

NUM_MICRO_BATCHES = 4
NUM_STEPS = 2
SIZE = 16
CPU = torch.device("cpu")

SCHEDULES: dict[str, tuple[Any, int]] = {
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
"""By name: torch's schedule, and stages on each rank."""


def pipeline(case: str, rank: int, *, with_pyao: bool) -> dict[str, Any]:
    """Train two steps of four micro-batches; return gradients, and metrics of each stage."""
    schedule, num_own = SCHEDULES[case]
    numbers = [rank + 2 * index for index in range(num_own)]
    modules = [Stack(linear_relu, linear_relu, size=SIZE) for _ in numbers]
    for number, module in zip(numbers, modules, strict=True):
        torch.manual_seed(number)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=SIZE**-0.5)
    last = 2 * num_own - 1
    with ExitStack() as stack:
        offloaders: list[Offloader] = []
        if with_pyao:
            offloaders = [stack.enter_context(attach(each, EVERY_LAYER)) for each in modules]
        stages = [
            PipelineStage(module, number, last + 1, CPU)
            for number, module in zip(numbers, modules, strict=True)
        ]
        runs = schedule(
            stages[0] if num_own == 1 else stages,
            n_microbatches=NUM_MICRO_BATCHES,
            loss_fn=nn.functional.mse_loss,
        )
        losses: list[Tensor] = []
        totals = []
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            given, wanted = torch.randn(2, 2 * NUM_MICRO_BATCHES, SIZE)
            inputs = [given] if rank == 0 else []
            more = {"target": wanted, "losses": losses} if last in numbers else {}
            runs.step(*inputs, **more)
            totals.append([dict(each.totals()) for each in offloaders])
        last_metrics = [dict(each.metrics()) for each in offloaders]
    gradients = [p.grad for each in modules for p in each.parameters()]
    return {
        "bits": [each.tolist() for each in gradients if each is not None],
        "losses": [each.item() for each in losses],
        "totals": totals,
        "last": last_metrics,
    }


def tensor_parallel(case: str, rank: int, *, with_pyao: bool) -> dict[str, Any]:
    """Train two steps of a Llama whose projections are divided between two ranks."""
    model: Any = tiny_model("llama")
    mesh = init_device_mesh("cpu", (2,))
    columns, rows = ColwiseParallel, RowwiseParallel
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {f"self_attn.{name}_proj": columns() for name in "qkv"}
            | {"self_attn.o_proj": rows(), "mlp.down_proj": rows()}
            | {f"mlp.{name}_proj": columns() for name in ("gate", "up")},
        )
    assert any(isinstance(each, DTensor) for each in model.parameters()), "tensor parallelism"
    addresses = {local_part(each).untyped_storage().data_ptr() for each in model.parameters()}
    moved_parameters, moved = 0, 0
    with ExitStack() as stack:
        offloader = stack.enter_context(attach(model, EVERY_LAYER)) if with_pyao else None
        if offloader is not None:
            mover = offloader.engine.mover
            own = mover.offload

            def offload(tensor: Tensor, *more: Any) -> Any:
                nonlocal moved_parameters, moved
                moved += 1
                moved_parameters += tensor.untyped_storage().data_ptr() in addresses
                return own(tensor, *more)

            mover.offload = offload  # type: ignore[method-assign]
        losses = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            loss = model(**tiny_batch(step), use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        last = {} if offloader is None else dict(offloader.metrics())
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    return {
        "bits": [each.tolist() for each in gradients],
        "losses": losses,
        "last": [last],
        "moved": moved,
        "moved_parameters": moved_parameters,
    }


def main(folder: Path, cases: Sequence[str]) -> None:
    """Train each case with hf_pyao and without."""
    rank = join_group(folder)
    assert DTENSOR.parameter_attribute
    found = {}
    for case in cases:
        run = pipeline if case in SCHEDULES else tensor_parallel
        plain, ours = (run(case, rank, with_pyao=value) for value in (False, True))
        found[case] = {"plain": plain, "ours": ours}
        dist.barrier()
    write_result(folder, found)
    dist.barrier()


if __name__ == "__main__":
    with ends_at_once():
        main(Path(sys.argv[1]), sys.argv[2:])
