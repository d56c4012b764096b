"""Streamed weights judged on a virtual clock: the claim about a step's time, and a grid of rivals.

    python recipes/studies/streaming_grid.py
    python recipes/studies/streaming_grid.py --result recipes/results/streaming_grid.json
    python recipes/studies/streaming_grid.py --result FILE.json --models Llama
    python recipes/studies/streaming_grid.py --smoke

With ``--models``, rows of other models that FILE.json has stay in it.

Nothing is trained, and no GPU is needed. Steps with LoRA adapters are recorded on fake tensors. The
parts:

    clock   a step beside the sum over forward and backward of the larger of compute and the bytes
            on the lane to the device, and one upload
    grid    `stream_weights="auto"` beside the best of three ways that need no choice: weights
            resident where that fits, all streamed, all streamed and checkpointing

Plans are made by the planner. Their times, and those of the rivals, are of the simulation's link,
which has a clock of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation, which is tests'

from hf_pyao.levers import NO_LEVERS, Levers, LeversRefusedError
from hf_pyao.plan.hardware.presets import find_hardware
from hf_pyao.plan.hardware.speeds import GIB, LinkModel
from hf_pyao.plan.options.lever_choice import LeverChoice
from hf_pyao.plan.predict.copy_lanes import RELOAD
from hf_pyao.plan.predict.predict import operation_times_ms, predict
from hf_pyao.plan.predict.predicted_uploads import uploads_of
from hf_pyao.plan.solve.conditions import Conditions
from hf_pyao.plan.solve.planner import Planner
from hf_pyao.plan.solve.steering import MEASURED
from hf_pyao.plan.step.prediction import Prediction
from hf_pyao.plan.step.step_program import BACKWARD, FORWARD, OUTSIDE, StepProgram
from hf_pyao.plan.step.streamed_step import streamed_layers, with_streamed_blocks
from hf_pyao.plan.weights.choice import StreamingChoice
from hf_pyao.tools.estimate.fake_step import FakeTraining
from hf_pyao.tools.estimate.model_specs import config_of, parse_model
from hf_pyao.tools.estimate.recorded_step import record_step
from result_file import write_result
from tests.helpers.simulation.replayed_step import replay_step

SCHEMA_VERSION = 1
CARD = "rtx4090"
WINDOW_BYTES = 2**28
CLOCK_LAYERS = 32
GRID_LAYERS = 12

ATTENTION = "q_proj,k_proj,v_proj,o_proj"
MODELS = {
    "OPT": (
        "opt:hidden_size=2048,ffn_dim=8192,word_embed_proj_dim=2048,num_attention_heads=32,"
        "vocab_size=50272,num_hidden_layers={}",
        "all-linear",
    ),
    "GPT-2": ("gpt2:n_embd=1600,n_head=25,vocab_size=50257,n_layer={}", "all-linear"),
    "Llama": (
        "llama:hidden_size=4096,intermediate_size=14336,num_attention_heads=32,"
        "num_key_value_heads=8,vocab_size=128256,num_hidden_layers={}",
        "all-linear",
    ),
    "Mixtral": (
        "mixtral:hidden_size=4096,intermediate_size=14336,num_attention_heads=32,"
        "num_key_value_heads=8,vocab_size=32000,num_local_experts=8,num_hidden_layers={}",
        ATTENTION,
    ),
}
"""Name -> model with a place for its layers, and the modules with adapters."""

SIZES: tuple[tuple[int, int], ...] = ((1, 512), (2, 1024))
"""Samples, and tokens of each."""
LINKS_GB_PER_S: tuple[float, ...] = (3.0, 6.0, 12.0, 25.0, 50.0)
SHARES: tuple[float, ...] = (0.05, 0.2, 0.45, 0.75, 1.0)
"""Where limits lie between all streamed with checkpointing, and everything kept on the device."""


@dataclass(frozen=True, kw_only=True)
class ClockRow:
    """One step on the clock. Times are in ms."""

    model: str
    tokens: int
    h2d_gb_per_s: float
    num_resident: int
    num_layers: int
    reloaded_bytes: int
    uploaded_bytes: int
    step_ms: float
    expected_ms: float
    """Of each pass over the layers the larger of compute and the lane to the device; what runs
    outside of layers; one upload."""
    off: float
    """The step over that, less 1."""


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """`auto` and its rivals. Times are in ms, of the simulation; infinite is None: does not fit."""

    model: str
    tokens: int
    link_gb_per_s: float
    limit_gb: float
    share: float
    fits: bool
    peak_gb: float
    num_streamed: int
    num_uploads: int
    auto_ms: float
    rivals_ms: dict[str, float | None]
    slower: float | None
    """`auto` over the best rival, less 1."""


def link_of(gb_per_s: float, d2h_gb_per_s: float | None = None) -> LinkModel:
    """Return a link of 1e9 bytes a second."""
    d2h = gb_per_s if d2h_gb_per_s is None else d2h_gb_per_s
    return LinkModel(d2h_gib_per_s=d2h * 1e9 / GIB, h2d_gib_per_s=gb_per_s * 1e9 / GIB)


def step_of(
    model: str, size: tuple[int, int], num_layers: int, *, checkpointing: bool = False
) -> StepProgram:
    """Return a step with all weights resident."""
    spec, targets = MODELS[model]
    training = FakeTraining(
        config=config_of(parse_model(spec.format(num_layers))),
        lora_rank=16,
        lora_targets=targets,
        training_state="device",
        checkpointing=checkpointing,
        kernels=find_hardware(CARD).kernels,
    )
    return record_step(training, *size)


# ---- the clock -----------------------------------------------------------------------------------


def clock_rows(
    model: str, size: tuple[int, int], program: StepProgram, links: Sequence[float]
) -> Iterator[ClockRow]:
    """Yield steps with all, and with seven eighths of the layers streamed.

    With everything kept, and with what all layers but the last save brought back, through a window
    of an eighth of it. The lane to the host is fast enough that forward does not wait for it.
    """
    times_ms = operation_times_ms(program, find_hardware(CARD).device)
    num_layers = program.num_layers
    for num_resident in (0, num_layers // 8):
        streamed = with_streamed_blocks(
            program, streamed_layers(num_layers, num_layers - num_resident)
        )
        for reloads in (False, True):
            leaves = [
                reloads and slot.nbytes >= 2**20 and slot.layer < num_layers - 1
                for slot in program.slots
            ]
            leaving_bytes = sum(
                slot.link_bytes
                for slot, is_out in zip(program.slots, leaves, strict=True)
                if is_out
            )
            for gb_per_s in links:
                link = link_of(gb_per_s, d2h_gb_per_s=400.0)
                found = predict(
                    streamed,
                    leaves,
                    window_bytes=leaving_bytes // 8,
                    times_ms=times_ms,
                    link=link,
                )
                expected_ms, reloaded = expected(streamed, found, times_ms, link)
                yield ClockRow(
                    model=model,
                    tokens=math.prod(size),
                    h2d_gb_per_s=gb_per_s,
                    num_resident=num_resident,
                    num_layers=num_layers,
                    reloaded_bytes=reloaded,
                    uploaded_bytes=found.uploaded_bytes,
                    step_ms=found.step_ms,
                    expected_ms=expected_ms,
                    off=found.step_ms / expected_ms - 1,
                )


def expected(
    program: StepProgram, found: Prediction, times_ms: Sequence[float], link: LinkModel
) -> tuple[float, int]:
    """Return what a step should take, in ms, and the bytes of its reloads.

    Of *found* only the bytes that cross the lane are looked at, not when they do.
    """
    compute_ms = {FORWARD: 0.0, BACKWARD: 0.0}
    outside_ms = 0.0
    for segment in program.segments:
        elapsed_ms = sum(times_ms[segment.start : segment.end])
        if segment.layer == OUTSIDE:
            outside_ms += elapsed_ms
        else:
            compute_ms[segment.phase] += elapsed_ms
    reloads = [
        program.slots[copy.slot].link_bytes
        for copy in found.copies
        if copy.direction == RELOAD and copy.slot >= 0
    ]
    lane_ms = {FORWARD: 0.0, BACKWARD: sum(link.copy_ms("reload", each) for each in reloads)}
    for phase, nbytes, _ in uploads_of(program):
        lane_ms[phase] += link.copy_ms("reload", nbytes)
    one_ms = link.copy_ms("reload", program.streamed.slot_bytes)
    both_ms = sum(max(compute_ms[phase], lane_ms[phase]) for phase in (FORWARD, BACKWARD))
    return both_ms + outside_ms + one_ms, sum(reloads)


# ---- the grid ------------------------------------------------------------------------------------


def choice_of(program: StepProgram, link: LinkModel) -> StreamingChoice:
    """Return what chooses the blocks and the plan; levers stay as they are."""

    def refused(levers: Levers) -> Planner:
        raise LeversRefusedError(f"{levers} is not looked at here")

    conditions = Conditions(link=link, window_bytes=WINDOW_BYTES, speed_ratios=MEASURED)
    times_ms = operation_times_ms(program, find_hardware(CARD).device)
    planner = Planner(program, times_ms, conditions)
    return StreamingChoice(LeverChoice(NO_LEVERS, planner, refused))


def kept(program: StepProgram) -> int:
    """Return the peak of a step that keeps all that it saves."""
    return predict(program, [False] * len(program.slots), window_bytes=WINDOW_BYTES).peak_bytes


def kept_ms(program: StepProgram, link: LinkModel, limit_bytes: float) -> float | None:
    """Return what a step takes that keeps all that it saves; None where it does not fit."""
    if kept(program) > limit_bytes:
        return None
    times_ms = operation_times_ms(program, find_hardware(CARD).device)
    leaves = [False] * len(program.slots)
    return replay_step(
        program, leaves, times_ms=times_ms, link=link, window_bytes=WINDOW_BYTES
    ).step_ms


def grid_rows(
    model: str,
    size: tuple[int, int],
    resident: StepProgram,
    again: StepProgram,
    links: Sequence[float],
    shares: Sequence[float],
) -> Iterator[GridRow]:
    """Yield one point for each link and limit."""
    everything = range(resident.num_layers)
    streamed, both = (with_streamed_blocks(each, everything) for each in (resident, again))
    most, least = kept(resident), kept(both)
    for gb_per_s in links:
        link = link_of(gb_per_s)
        for share in shares:
            limit_bytes = least + share * (most - least)
            rivals_ms = {
                "resident": kept_ms(resident, link, limit_bytes),
                "stream all": kept_ms(streamed, link, limit_bytes),
                "checkpoint and stream": kept_ms(both, link, limit_bytes),
            }
            chosen = choice_of(resident, link).best(limit_bytes)
            candidate = chosen.levers.candidate
            step = candidate.step
            auto_ms = replay_step(
                step.program,
                step.leaves,
                times_ms=step.times_ms,
                link=link,
                window_bytes=candidate.window_bytes,
                rebuilds=step.rebuilds,
            ).step_ms
            best_ms = min((each for each in rivals_ms.values() if each is not None), default=None)
            yield GridRow(
                model=model,
                tokens=math.prod(size),
                link_gb_per_s=gb_per_s,
                limit_gb=limit_bytes / 1e9,
                share=share,
                fits=chosen.levers.fits and candidate.peak_bytes <= limit_bytes,
                peak_gb=candidate.peak_bytes / 1e9,
                num_streamed=len(chosen.weights.streamed_layers),
                num_uploads=chosen.weights.num_uploads,
                auto_ms=auto_ms,
                rivals_ms=rivals_ms,
                slower=None if best_ms is None else auto_ms / best_ms - 1,
            )


def rows_of_others(
    path: Path | None, models: Collection[str]
) -> tuple[list[ClockRow], list[GridRow]]:
    """Return what the file at *path*, if there is one, has of other models than *models*."""
    if path is None or not path.exists():
        return [], []
    found = json.loads(path.read_text())
    clock = [ClockRow(**row) for row in found["clock"] if row["model"] not in models]
    return clock, [GridRow(**row) for row in found["grid"] if row["model"] not in models]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--result", type=Path, metavar="FILE.json")
    parser.add_argument("--smoke", action="store_true", help="one model, one size, two points")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes, links, shares = SIZES, LINKS_GB_PER_S, SHARES
    if args.smoke:
        args.models = ["OPT"]
        sizes, links, shares = SIZES[:1], (12.0,), (0.2, 1.0)
    clock, grid = rows_of_others(args.result, args.models)
    began = time.monotonic()
    for model in args.models:
        for size in sizes:
            deep = step_of(model, size, CLOCK_LAYERS)
            for row in clock_rows(model, size, deep, links):
                clock.append(row)
                print(
                    f"{row.model:8} {row.tokens:5} tokens, {row.h2d_gb_per_s:4.0f} GB/s, "
                    f"{row.num_resident:2} of {row.num_layers} stay, "
                    f"{row.reloaded_bytes / 1e9:6.2f} GB reloaded: {row.step_ms:9.1f} ms, "
                    f"expected {row.expected_ms:9.1f}, {row.off:+.2%}",
                    flush=True,
                )
            program = step_of(model, size, GRID_LAYERS)
            again = step_of(model, size, GRID_LAYERS, checkpointing=True)
            for point in grid_rows(model, size, program, again, links, shares):
                grid.append(point)
                said = ", ".join(
                    f"{name} {'-' if ms is None else f'{ms:.1f}'}"
                    for name, ms in point.rivals_ms.items()
                )
                off = "" if point.slower is None else f" ({point.slower:+.2%})"
                print(
                    f"{point.model:8} {point.tokens:5} tokens, {point.link_gb_per_s:4.0f} GB/s, "
                    f"{point.limit_gb:6.2f} GB: auto {point.auto_ms:.1f} ms, "
                    f"{point.num_streamed} streamed; {said}{off}"
                    f"{'' if point.fits else ' DOES NOT FIT'}",
                    flush=True,
                )
        if args.result is not None:  # after each model: a run that is ended keeps what it has
            write_result(
                args.result,
                kind="streaming_grid",
                schema_version=SCHEMA_VERSION,
                card=asdict(find_hardware(CARD)),
                grid_layers=GRID_LAYERS,
                clock=clock,
                grid=grid,
            )
    print(
        f"{len(clock)} steps, worst {max(abs(each.off) for each in clock):.2%} off; {len(grid)} "
        f"points, {sum((each.slower or 0) > 0.002 for each in grid)} slower than a rival by more "
        f"than 0.2 %; {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
