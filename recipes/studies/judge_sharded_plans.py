"""Judge the planner on steps that FSDP2 shards: with collectives, against simpler ways.

    python recipes/studies/judge_sharded_plans.py               an hour on two cores
    python recipes/studies/judge_sharded_plans.py --model opt --result FILE.json
    python recipes/studies/judge_sharded_plans.py --smoke       two points of one model

Each step is one of eight ranks', in bfloat16, each layer a unit. It is recorded on fake tensors and
a fake process group, so its all-gathers and reduce-scatters are in it. The chosen plan is held
against keeping everything, checkpointing, offloading layer inputs, offloading everything, and
either of the first layers alone, where those fit. Interconnects are as fast as NVLink's, and so
slow that compute waits for collectives most of the time. Times come from a replay, whose clock
reckons copies and collectives by itself; nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from tqdm import tqdm

from hf_pyao.model.map.module_map import find_layers
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB
from hf_pyao.plan.predict.predict import operation_times_ms
from hf_pyao.plan.predict.speed_range import MEASURED
from hf_pyao.plan.solve.planner import CHECKPOINT, KEEP_ALL, LAYER_INPUTS, OFFLOAD_ALL, Planner
from hf_pyao.plan.solve.step_problem import Conditions
from hf_pyao.plan.step.step_program import StepProgram
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_sizes import build_config, find_size
from hf_pyao.tools.estimate.recorded_step import record_step
from hf_pyao.training_engines import local_part

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_file import write_result
from studies.judged_steps import SIZES, WINDOW_BYTES, link_of, replayed

SCHEMA_VERSION = 1
NUM_RANKS = 8
SEQUENCE_LENGTH = 512
MICRO_BATCH = 4
CARDS = {"rtx4070": (12.5, (4.0, 12.0)), "h200": (50.0, (40.0, 400.0))}
"""Card -> speed of its link to the host, and of interconnects between devices, GB/s."""
SHARES = (0.05, 0.2, 0.4, 0.7)
"""Where between the least and the most memory the limit is."""
SIMPLE = (KEEP_ALL, CHECKPOINT, LAYER_INPUTS, OFFLOAD_ALL)


@dataclass(frozen=True, kw_only=True)
class ShardedPoint:
    """One step of a rank, within one limit."""

    model: str
    card: str
    link_gb_per_s: float
    collective_gb_per_s: float
    limit_bytes: float
    chosen: str
    chosen_ms: float
    """Replayed."""
    predicted_ms: float
    waits_for_collectives_ms: float
    peak_bytes: int
    best: str
    """Of the simpler ways that fit, the fastest."""
    best_ms: float
    kept_ms: float
    """Keeping everything, which may not fit."""

    @property
    def gap(self) -> float:
        """How much slower than the best simpler way that fits; below 0: faster."""
        return self.chosen_ms / self.best_ms - 1


@dataclass(frozen=True, kw_only=True)
class ShardedTraining(FakeTraining):
    """A rank of FSDP2's: each layer is a unit, and the rest is one; states of AdamW are divided."""

    @contextmanager
    def model(self) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Build the model, and shard it over ranks that are not there."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with super().model() as (model, fake_mode):
            with unset_fake_temporarily():
                mesh = init_device_mesh("cpu", (NUM_RANKS,))
            for _, layer in find_layers(model).layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            yield model, fake_mode

    def state_bytes(self, model: nn.Module) -> int:
        """Return the bytes of this rank's part of the optimizer's states."""
        return self.optimizer_bytes * sum(local_part(p).numel() for p in model.parameters())


@contextmanager
def ranks() -> Iterator[None]:
    """Be the first of eight ranks, of which there are no others: nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def program_of(model: str, micro_batch: int, length: int) -> StepProgram:
    """Return the recorded step of a rank."""
    config = build_config(model, find_size(model, SIZES[model]))
    return record_step(ShardedTraining(config=config, training_state="device"), micro_batch, length)


def points_of(
    model: str,
    card: str,
    collective_gb_per_s: float,
    shares: Sequence[float] = SHARES,
    micro_batch: int = MICRO_BATCH,
    length: int = SEQUENCE_LENGTH,
) -> Iterator[ShardedPoint]:
    """Judge a step at several limits."""
    program = program_of(model, micro_batch, length)
    assert sum(each.collective is not None for each in program.operations) > program.num_layers
    link_gb_per_s = CARDS[card][0]
    link = link_of(card, link_gb_per_s, find_hardware(card).link.copy_engines)
    device = dataclasses.replace(
        find_hardware(card).device, collective_gib_per_s=collective_gb_per_s * 1e9 / GIB
    )
    # As after measuring, which a run of several ranks always does.
    conditions = Conditions(link=link, window_bytes=WINDOW_BYTES, speed_ratios=MEASURED)
    planner = Planner(program, operation_times_ms(program, device), conditions)
    simple = planner.simple()
    peaks = [each.peak_bytes for each in simple.values()]
    for share in shares:
        limit = min(peaks) + share * (max(peaks) - min(peaks))
        chosen = planner.best(limit)
        rivals: dict[str, Any] = {
            name: simple[name] for name in SIMPLE if simple[name].peak_bytes <= limit
        }
        rivals |= {each.name: each for each in planner.first_layers_fitting(limit)}
        times = {name: replayed(each, link).step_ms for name, each in rivals.items()}
        best = min(times, key=lambda name: times[name])
        timed = chosen.timed
        yield ShardedPoint(
            model=model,
            card=card,
            link_gb_per_s=link_gb_per_s,
            collective_gb_per_s=collective_gb_per_s,
            limit_bytes=limit,
            chosen=chosen.name,
            chosen_ms=replayed(chosen, link).step_ms,
            predicted_ms=chosen.step_ms,
            waits_for_collectives_ms=timed.collective_forward_ms + timed.collective_backward_ms,
            peak_bytes=chosen.peak_bytes,
            best=best,
            best_ms=times[best],
            kept_ms=simple[KEEP_ALL].step_ms,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, action="append", help="(default: all three)")
    parser.add_argument("--smoke", action="store_true", help="two points, to see that it runs")
    parser.add_argument("--result", type=Path, metavar="FILE.json", help="write the figures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    cells = [
        (model, card, speed)
        for model, card in itertools.product(args.model or SIZES, CARDS)
        for speed in CARDS[card][1]
    ]
    points: list[ShardedPoint] = []
    with ranks():
        if args.smoke:
            points += points_of("opt", "rtx4070", 12.0, SHARES[::2], micro_batch=1, length=64)
        else:
            for cell in tqdm(cells, unit="step", leave=False):
                points += points_of(*cell)
    show(points)
    if args.result is not None:
        write_result(
            args.result,
            kind="judged_sharded_plans",
            schema_version=SCHEMA_VERSION,
            num_ranks=NUM_RANKS,
            micro_batch=MICRO_BATCH,
            sequence_length=SEQUENCE_LENGTH,
            points=points,
        )


def show(points: Sequence[ShardedPoint]) -> None:
    """Print each point, and what they come to."""
    for point in sorted(points, key=lambda each: -each.gap):
        print(
            f"{point.model}, {point.card}, link {point.link_gb_per_s:g} GB/s, interconnect "
            f"{point.collective_gb_per_s:g} GB/s, {point.limit_bytes / GIB:.2f} GiB: "
            f"{point.chosen_ms:.1f} ms ({point.waits_for_collectives_ms:.1f} of waiting for "
            f"collectives), {100 * point.gap:+.2f} % against {point.best!r}"
        )
    gaps = [point.gap for point in points]
    print(
        f"{len(points)} points: {100 * statistics.median(gaps):+.1f} % in the median, "
        f"{100 * min(gaps):+.1f} % at best and {100 * max(gaps):+.2f} % at worst."
    )


if __name__ == "__main__":
    main()
